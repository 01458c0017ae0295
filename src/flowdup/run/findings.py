"""Known ailments of training, each a rule on numbers: what shows it, and what to try.

`diagnosis.py` applies them to a run folder, `watch.py` while a run trains.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from torch import Tensor
from torch.func import grad
from torch.nn.utils import get_total_norm

from flowdup.batches import batch_plan, cap_batch_size, local_batches
from flowdup.config import Config
from flowdup.data import ClientData, InputSpec
from flowdup.data.statistics import OFFSET_REMEDY, offset_sentence
from flowdup.methods import Batch, MethodConfig, Params
from flowdup.report import is_number
from flowdup.run.folder import Metrics
from flowdup.run.simulation import Simulation
from flowdup.server import ServerState

_DROP = 1.0  # percentage points of validation accuracy
_LOSS_FALLS = 0.9  # to this share of what it was
_STUCK = 0.01  # the spread of r(X), as a share of its length
_MORE = 0.25  # of all predictions, that a class has more of than of the labels
_WINDOW = 10  # rounds over which the loss is averaged


@dataclass(frozen=True)
class Finding:
    """Something that a run suffers from."""

    name: str
    numbers: dict[str, float]  # that show it
    text: str
    remedy: str


def find_overfitting(rows: Sequence[Metrics], config: Config) -> Iterator[Finding]:
    """In the last stage: the training loss falls on while validation accuracy goes down."""
    stage = stage_rows(rows, max((row.get("stage", 0) for row in rows), default=0))
    found = accuracies(stage)
    if len(found) < 2:
        return
    (best, top), (last, end) = max(found, key=lambda pair: (pair[1], -pair[0])), found[-1]
    then, now = (_loss_until(stage, number) for number in (best, last))
    if top - end >= _DROP and now <= _LOSS_FALLS * then:
        tries = {
            "run.keep = 'best'": config.run.keep != "best",
            "run.patience": not config.run.patience,
            "a smaller method.subspace.k": has_subspace(config.method),
            "client.shift for images": not config.client.shift,
            "client.mirror where a mirrored image means the same": not config.client.mirror,
            "client.rotate_batches for square images that some clients hold rotated": (
                not config.client.rotate_batches
            ),
            "more clients": True,
        }
        yield Finding(
            "over-fitting",
            {"best_round": best, "best": top, "last": end, "loss_then": then, "loss_now": now},
            f"since round {best} accuracy on validation clients fell from {top:.1f}% to {end:.1f}% "
            f"while the training loss fell from {then:.3g} to {now:.3g}",
            f"try {', '.join(remedy for remedy, fits in tries.items() if fits)}, or fewer rounds",
        )


def no_validation(config: Config, clients: int | None = None) -> Finding:
    """What it means that no validation client has labels, of so many, if that is known."""
    lost = ["no round can be called the best"]
    if config.method.common.correction != "none":
        lost.append("models are not calibrated")
    if config.run.patience:
        lost.append("run.patience ends no stage")
    return Finding(
        "no-validation",
        {"labeled": 0.0} | ({} if clients is None else {"clients": clients}),
        f"no validation client has a label: {', and '.join(lost)}",
        "set data.validation_clients, and give some of these clients labels",
    )


def find_offset(inputs: InputSpec) -> Iterator[Finding]:
    """By the mean and standard deviation that inputs are read with."""
    if told := offset_sentence(inputs.mean, inputs.std, inputs.columns):
        largest = max(abs(m) / s for m, s in zip(inputs.mean, inputs.std, strict=True))
        yield Finding("digits-lost", {"mean_by_std": largest}, told, OFFSET_REMEDY)


def find_no_move(state: ServerState, config: Config) -> Iterator[Finding]:
    """By the correction of the models that count, if they have one."""
    correction = state.correction
    if "move" not in correction or float(correction["move"]):
        return
    strength, method = float(correction["strength"]), config.stages[state.stage].method
    left = "differ by the prior of class shares alone" if strength else "are the same"
    yield Finding(
        "no-personal-move",
        {"move": 0.0, "strength": strength},
        f"correction.move is 0: on validation clients the personal models of '{method.name}' were "
        f"no better than everyone's, which all clients get in their place, and models {left}",
        "give the last stage more rounds or labels of more clients; or train a method with one "
        "model for all and method.correction = 'em', 'fedavg' or 'fedavg-pseudo', which is simpler",
    )


def has_subspace(method: MethodConfig) -> bool:
    """Whether personal models differ in the k numbers of `method.subspace`."""
    return "subspace" in method.table()


def find_stuck_embedding(r: Tensor) -> Iterator[Finding]:
    """By the embeddings r(X) of some clients, [clients, embedding]."""
    r = r.double()
    center = r.mean(0)
    spread = float((r - center).square().sum(1).mean().sqrt())
    share = spread / max(float(center.norm()), 1e-12)
    if share < _STUCK:
        yield Finding(
            "stuck-embedding",
            {"spread": share, "clients": len(r)},
            f"the embeddings r(X) of {len(r)} clients are alike: they spread by "
            f"{100 * share:.2g}% of their length, so that all clients get about the same model",
            "try a lower client.optimizer.lr, method.hypernetwork.pooling = 'mean-std', a smaller "
            "method.regularization, or look whether inputs differ between clients at all",
        )


def find_dominating_class(
    predicted: Tensor, labels: Tensor, simulation: Simulation
) -> Iterator[Finding]:
    """By how many points of validation clients are of each class, as predicted and truly."""
    method, spec = simulation.config.method, simulation.population.spec
    predicted, truly = predicted / predicted.sum(), labels / labels.sum()  # [classes]
    most = int(predicted.argmax())
    name = spec.class_names[most] if spec.class_names else str(most)
    if predicted[most] - truly[most] >= _MORE:
        tries = {
            "method.name = 'fedavg-la'": "adjusted" not in method.table(),
            "method.correction = 'em'": method.common.correction == "none"
            and not simulation.method.predicts_jointly,
        }
        untried = " or ".join(remedy for remedy, fits in tries.items() if fits)
        yield Finding(
            "one-class-dominates",
            {"class": most, "predicted": float(predicted[most]), "labels": float(truly[most])},
            f"{100 * predicted[most]:.0f}% of all predictions for validation clients are class "
            f"'{name}', which {100 * truly[most]:.0f}% of their labels are",
            "train longer or with a higher client.optimizer.lr"
            + (f"; where classes are unbalanced, try {untried}" if untried else ""),
        )


def find_clipping(norms: Sequence[float], clip: float) -> Iterator[Finding]:
    """By the norms of some clients' first gradients; nothing if one of them is not clipped."""
    if clip and norms and min(norms) > clip:
        yield Finding(
            "clipped-gradients",
            {"clip": clip, "median_norm": median(norms), "clients": len(norms)},
            f"the gradients of all of {len(norms)} training clients are longer than client.clip = "
            f"{clip:g} (their median is {median(norms):.2g}), so that every step has the same "
            "length",
            "try a larger client.clip, or 0 for none, with a lower client.optimizer.lr, and look "
            "whether inputs are normalised (data.normalize)",
        )


def gradient_norms(
    simulation: Simulation, state: ServerState, clients: Sequence[ClientData]
) -> list[float]:
    """Of every client's gradient on its first batch, as a round begins; nothing is trained."""
    method, config = simulation.method, simulation.config.client
    start = state.psi | {n: state.method_state[n] for n in method.broadcast}
    orders = simulation.stream.child("order", state.round + 1)
    size = cap_batch_size(config.batch_size, simulation.population.train)

    def norm(client: ClientData) -> float:
        plan = batch_plan(orders, 0, len(client), 1, size, config.augmentation)
        device, dtype = simulation.device, simulation.dtype
        batches = local_batches(client, plan[:1], device, dtype, config.augmentation)
        batch = Batch(*(t[0] for t in batches))

        def loss(psi: Params) -> Tensor:
            return method.loss(psi, batch, start)

        return float(get_total_norm([*grad(loss)(state.psi).values()]))

    return [norm(client) for client in clients]


def stage_rows(rows: Sequence[Metrics], stage: int) -> list[Metrics]:
    """Those of one stage."""
    return [row for row in rows if row.get("stage", 0) == stage]


def accuracies(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Of validation clients, by round."""
    key = "validation_accuracy"
    return [(row["round"], row[key]) for row in rows if is_finite(row.get(key))]


def _loss_until(rows: Sequence[Metrics], last: int) -> float:
    """The mean over some rounds before and with this one."""
    there = [r["loss"] for r in rows if last - _WINDOW < r["round"] <= last]
    return fmean(loss if is_finite(loss) else math.inf for loss in there)


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a chart can hold."""
    return is_number(value) and math.isfinite(value)
