"""FLowDUP+ against the nearest other method, and FLowDUP against the paper, cell by cell."""

from collections.abc import Sequence

from layout import Results, grid, tenths
from reproduced import Cell, mean_of, paper_of, spread_of

OWN = "FLowDUP+"
MAIN = {  # tables that FLowDUP+ has a row in, in a reader's words
    "paper-cifar10-cnn": "CIFAR-10",
    "paper-cifar10-resnet18": "CIFAR-10, ResNet18",
    "paper-rotated-fashion-mnist": "rotated Fashion-MNIST",
    "paper-rotated-mnist": "rotated MNIST",
    "paper-femnist": "FEMNIST",
}


def scores(results: Results, columns: Sequence[str] = ()) -> str:
    """A line per data set and share of labels (those named; all, if none are)."""
    head = ["accuracy, %", OWN, "nearest other method", "ahead by", "on the other half"]
    head += ["others that have run", "FLowDUP", "*the paper's FLowDUP*", "*the paper's FedAvg*"]
    body = []
    for name, title in MAIN.items():
        table = results.table(name)
        for column in table["columns"]:
            cells = {cell["row"]: cell for cell in table["cells"] if cell["column"] == column}
            own = cells.pop(OWN)
            if own["mean"] is None or (columns and column not in columns):
                continue
            compared = [cell for cell in cells.values() if _shares_seeds(cell)]
            line = [f"{title}, {column}", spread_of(own, "accuracy")]
            line += _against(min(compared, key=_lead)) if compared else ["", "", ""]
            line += [f"{len(compared)} of {len(cells)}", spread_of(cells["FLowDUP"], "accuracy")]
            body.append([*line, *(paper_of(cells[row]) for row in ("FLowDUP", "FedAvg"))])
    return grid(head, body)


def against_the_paper(results: Results) -> str:
    """A line per table of the paper: how many of FLowDUP's cells reach it, and which do not."""
    body = []
    for file in sorted((results.root / "results").glob("paper-*.json")):
        table = results.table(file.stem)
        cells = [
            cell
            for cell in table["cells"]
            if cell["method"] == "flowdup" and cell["paper_mean"] is not None
        ]
        run = [cell for cell in cells if cell["mean"] is not None]
        short = [cell for cell in run if _below_paper(cell) > 0]
        named = [f"{c['row']}, {c['column']}: {tenths(_below_paper(c))}" for c in short]
        if cells:
            counts = [f"{len(run)} of {len(cells)}", str(len(run) - len(short))]
            body.append([table["title"], *counts, "; ".join(named)])
    head = ["table", "cells that have run", "reach the paper's mean less its deviation"]
    return grid([*head, "the others, and how much they lack"], body)


def _shares_seeds(cell: Cell) -> bool:
    """Whether it can be compared with FLowDUP+, seed by seed."""
    return cell.get("difference", {}).get("accuracy", {}).get("mean") is not None


def _against(cell: Cell) -> list[str]:
    name = cell["row"].replace(" + ", ", ")
    leads = [_ahead(cell, measure) for measure in ("accuracy", "held_out")]
    return [f"{spread_of(cell, 'accuracy')}, {name}", *leads]


def _lead(cell: Cell) -> float:
    """Of FLowDUP+ over a cell, with the same seeds."""
    return -float(cell["difference"]["accuracy"]["mean"])


def _ahead(cell: Cell, measure: str) -> str:
    """With its standard error, and in bold if it is more than that."""
    found = cell["difference"][measure]
    if found["mean"] is None:
        return ""
    lead, error = -found["mean"], found["standard_error"]
    if error is None:
        return f"{lead:+.2f}"
    return (f"**{lead:+.2f}**" if abs(lead) > error else f"{lead:+.2f}") + f" ({error:.2f})"


def _below_paper(cell: Cell) -> float:
    """What is missing to the paper's mean less its deviation, to the tenth that is shown."""
    mean = mean_of(cell, "accuracy")
    assert mean is not None
    return round(cell["paper_mean"] - cell["paper_std"] - mean, 1)
