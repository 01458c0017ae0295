"""Accuracies: of the demo, of precisions, with privacy, and of every seed."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from layout import Results, bold, grid, known, origins, spread, tenths
from table import Result

DEMO = {  # what a client gets
    "flowdup-plus": "its own model, near one trained for all, its class shares known",
    "calibrated-em": "FedAvg's model, calibrated, its class shares found by EM",
    "flowdup": "its own model, in a subspace",
    "fedavg": "the model that everyone gets",
    "ld-fedavg": "the same, trained in a subspace",
}


def grouped(rows: Sequence[Result], key: str) -> dict[str, list[Result]]:
    names = dict.fromkeys(row[key] for row in rows)
    return {name: [row for row in rows if row[key] == name] for name in names}


def accuracies(groups: dict[str, list[Result]], names: Iterable[str]) -> list[str]:
    found = [known(groups.get(name, []), "accuracy") for name in names]
    means = [fmean(values) if values else None for values in found]
    return bold([spread(values) for values in found], means, max)


def demo(results: Results) -> str:
    found = grouped(results.runs("demo"), "variant")
    groups = {name: found[name] for name in DEMO}
    columns = [f"`{name}`" for name in groups], DEMO.values(), accuracies(groups, groups)
    return grid(["method", "what a client gets", "accuracy, %"], zip(*columns, strict=True))


def precision(results: Results) -> str:
    rows = results.runs("precision")
    kinds = {"tf32": "TF32", "bf16": "bf16"}

    def cell(group: Sequence[Result], kind: str) -> str:
        values = known([row for row in group if row["variant"].endswith(kind)], "accuracy")
        return f"{spread(values)} ({', '.join(map(tenths, values))})"

    body = [
        [f"`{name}`", *(cell(group, kind) for kind in kinds)]
        for name, group in grouped(rows, "method").items()
    ]
    return grid(["unlabeled test clients", *kinds.values()], body)


def in_detail(results: Results, file: str) -> str:
    """Every variant of an experiment, every seed."""
    rows = results.runs(file)
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
        for name, group in grouped(rows, "method").items()
    ]
    return f"{grid(head, body)}\n{origins(rows)}"
