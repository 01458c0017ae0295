"""Accuracies: of all methods, beside the paper's, and of every seed."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from layout import Results, bold, grid, known, origins, spread, tenths
from table import Result

METHODS = {  # what a client gets
    "flowdup-plus": "its own model, near one trained for all, its class shares known",
    "calibrated-em": "FedAvg's model, calibrated, its class shares found by EM",
    "flowdup": "its own model, in a subspace",
    "fedavg": "the model that everyone gets",
    "fedprox": "the same, with a proximal term",
    "ld-fedavg": "the same, trained in a subspace",
    "fedtta": "FedAvg's model after one step on a learned loss",
    "fedavg-tent": "FedAvg's model after entropy minimisation",
    "fedavg-la": "one model, trained with logit adjustment",
    "fedavg-pseudo": "one model, trained on pseudo-labels, too",
    "fedavg-em": "FedAvg's model with its label prior corrected by EM",
    "lame": "FedAvg's predictions, corrected together",
    "atp": "FedAvg's model after an entropy step with learned rates",
    "flux": "the model of its cluster, found without labels",
    "arm-cml": "one model that also reads a summary of its points",
    "pefll": "its own model, all weights from a hypernetwork",
    "odpfl-hn": "the same, with a narrower encoder",
}
PAPER = {  # at p = 1.0: its tables 1 and 2, and rotated MNIST in its appendix
    "cifar10": {
        "flowdup": 86.6,
        "fedavg": 63.6,
        "fedprox": 63.7,
        "ld-fedavg": 56.2,
        "fedtta": 69.7,
    },
    "femnist": {"flowdup": 89.3, "fedavg": 84.3},
    "mnist": {"flowdup": 98.5, "fedavg": 96.4, "ld-fedavg": 95.0},
}


def by_method(rows: Sequence[Result], key: str = "method") -> dict[str, list[Result]]:
    """In the order of METHODS, others after them; or by variant."""
    names = dict.fromkeys([*METHODS, *(row[key] for row in rows)])
    groups = {name: [row for row in rows if row[key] == name] for name in names}
    return {name: group for name, group in groups.items() if group}


def accuracies(groups: dict[str, list[Result]], names: Iterable[str]) -> list[str]:
    found = [known(groups.get(name, []), "accuracy") for name in names]
    means = [fmean(values) if values else None for values in found]
    return bold([spread(values) for values in found], means, max)


def paper(data: str, names: Iterable[str]) -> list[str]:
    return [str(PAPER[data].get(name, "")) for name in names]


def megabytes(value: float) -> str:
    return f"{value / 1e6:.2f}" if value < 1e7 else f"{value / 1e6:.1f}"


def demo(results: Results) -> str:
    groups = by_method(results.runs("demo"), "variant")
    columns = [f"`{name}`" for name in groups], [METHODS.get(name, "") for name in groups]
    head = ["method", "what a client gets", "accuracy, %"]
    return grid(head, zip(*columns, accuracies(groups, groups), strict=True))


def methods(results: Results) -> str:
    cifar10 = by_method(results.runs("first-look", "cifar10"))
    digits = by_method(results.runs("digits-methods"))
    names = list(dict.fromkeys([*digits, *cifar10]))
    sent = [known(cifar10.get(name, []), "bytes_up")[:1] for name in names]
    columns = {
        "method": [f"`{name}`" for name in names],
        "what a client gets": [METHODS.get(name, "") for name in names],
        "CIFAR-10": accuracies(cifar10, names),
        "paper": paper("cifar10", names),
        "digits": accuracies(digits, names),
        "sent up, MB": ["".join(map(megabytes, values)) for values in sent],
    }
    return grid(list(columns), zip(*columns.values(), strict=True))


def other_data(results: Results) -> str:
    femnist = by_method(results.runs("first-look", "femnist"))
    mnist = by_method(results.runs("rotated-mnist"))
    names = list(dict.fromkeys([*mnist, *femnist]))
    columns = (
        [f"`{name}`" for name in names],
        accuracies(femnist, names),
        paper("femnist", names),
        accuracies(mnist, names),
        paper("mnist", names),
    )
    head = ["method", "FEMNIST", "paper", "rotated MNIST", "paper"]
    return grid(head, zip(*columns, strict=True))


def precision(results: Results) -> str:
    rows = results.runs("precision")
    kinds = {"tf32": "TF32", "bf16": "bf16"}

    def cell(group: Sequence[Result], kind: str) -> str:
        values = known([row for row in group if row["variant"].endswith(kind)], "accuracy")
        return f"{spread(values)} ({', '.join(map(tenths, values))})"

    body = [
        [f"`{name}`", *(cell(group, kind) for kind in kinds)]
        for name, group in by_method(rows).items()
    ]
    return grid(["unlabeled test clients", *kinds.values()], body)


def in_detail(results: Results, file: str, data: str = "") -> str:
    """Every variant of an experiment, every seed."""
    rows = results.runs(file, data)
    keys = {"accuracy": "accuracy", "held_out": "other half", "worst_decile": "worst decile"}
    shown = {key: title for key, title in keys.items() if known(rows, key)}
    body = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == name]
        seeds = ", ".join(map(tenths, known(mine, "accuracy")))
        body.append([f"`{name}`", *(spread(known(mine, key)) for key in shown), seeds])
    return f"{grid(['variant', *shown.values(), 'accuracy of each seed'], body)}\n{origins(rows)}"


def privacy(results: Results) -> str:
    """By method and epsilon, as it was after the last round."""
    rows = results.runs("digits-privacy")
    epsilons = list(dict.fromkeys(row.get("epsilon") for row in rows))

    def cell(group: Sequence[Result], epsilon: float | None) -> str:
        return spread(known([row for row in group if row.get("epsilon") == epsilon], "accuracy"))

    head = ["test clients", *("no noise" if e is None else f"epsilon {e:.1f}" for e in epsilons)]
    body = [
        [f"`{name}`", *(cell(group, e) for e in epsilons)]
        for name, group in by_method(rows).items()
    ]
    return f"{grid(head, body)}\n{origins(rows)}"
