"""What is told of a round: loss, broadcast numbers, who was refused, whether it diverged; and how
good it is for validation clients, where it was evaluated.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch.nn.utils import get_total_norm

from flowdup.errors import TrainingError
from flowdup.evaluation import Summary
from flowdup.methods import Params
from flowdup.run.folder import Metrics
from flowdup.server import Round, ServerState


def numbers_of(result: Round) -> Params:
    """Single numbers, still where they were computed: what is told, and whether all is finite."""
    return _told(result) | _magnitudes(result.state)


def _told(result: Round) -> Params:
    """The loss, and what was broadcast, as far as it is single numbers."""
    return {"loss": result.loss} | {n: t for n, t in result.broadcast.items() if t.ndim == 0}


def _magnitudes(state: ServerState) -> Params:
    """Sums of all magnitudes: not finite where one number is not.

    A method's own state may have infinite numbers: a lowest loss, before the first.
    """
    groups = {"psi": state.psi, "the server optimizer's state": state.optimizer}
    return {n: get_total_norm([*g.values()], norm_type=1.0) for n, g in groups.items() if g}


def round_metrics(result: Round, numbers: dict[str, float]) -> Metrics:
    """What metrics.jsonl says of a round, by the values of `numbers_of`.

    TrainingError where one is not finite that must be.
    """
    finite = {n: number if math.isfinite(number) else None for n, number in numbers.items()}
    diverged = [n for n, number in finite.items() if number is None and n not in result.broadcast]
    if diverged:
        raise TrainingError(
            f"training diverged in round {result.state.round}, {diverged[0]} is not finite: lower "
            "client.optimizer.lr or server.optimizer.lr"
        )
    return {
        "round": result.state.round,
        **{name: finite[name] for name in _told(result)},
        "padding": round(result.padding, 4),
        **_guard_metrics(result),
    }


class Validation(NamedTuple):
    """Of a state's personal models on validation clients, and the correction that they have."""

    accuracies: Summary  # in percent
    loss: float  # mean negative log-likelihood of a labeled point; infinite: nobody told it
    correction: Params


class Validated(NamedTuple):
    """How good a round was for validation clients, in percent."""

    round: int
    accuracy: float
    worst_decile: float | None  # None: older metrics lack it
    loss: float  # infinite where nobody told it


def validation_metrics(found: Validation, at_start: bool = False) -> Metrics:
    """What metrics.jsonl says of an evaluation: of the round, or of what its stage began from."""
    summary = found.accuracies
    if summary.mean is None:
        return {}
    prefix = "start" if at_start else "validation"
    loss = {f"{prefix}_loss": found.loss} if math.isfinite(found.loss) else {}
    return {
        f"{prefix}_accuracy": summary.mean,
        f"{prefix}_worst_decile": summary.worst_decile,
        **loss,
    }


def best_of(found: Sequence[Validated]) -> Validated:
    """The evaluation whose round is kept: `BestRound`, by the metrics."""
    return min(found, key=lambda one: (-one.accuracy, one.loss))


def validated(rows: Sequence[Metrics], stage: int) -> list[Validated]:
    """The evaluations of a stage, by the metrics of all rounds: its start, if it was evaluated, and
    every round that was.
    """
    return [
        Validated(
            row["round"] - before,
            row[f"{prefix}_accuracy"],
            row.get(f"{prefix}_worst_decile"),
            row.get(f"{prefix}_loss", math.inf),
        )
        for row in rows
        if row.get("stage", 0) == stage
        for prefix, before in (("start", 1), ("validation", 0))
        if f"{prefix}_accuracy" in row
    ]


def _guard_metrics(result: Round) -> Metrics:
    """Who was refused and why, by client id, where replies are looked at one by one."""
    if not result.guard:
        return {}
    refused = {str(result.cohort.get(r.member, -1)): r.reason for r in result.guard.refused}
    return {
        "update_norm": result.guard.norm,
        "clipped": result.guard.clipped,
        "refused": len(result.guard.refused),
        **({"refused_clients": refused} if refused else {}),
    }
