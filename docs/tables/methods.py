"""Every method in a line: what a client gets, how good it is, what clients send."""

from layout import Results, bold, grid
from reproduced import Cell, mean_of, spread_of

DATA = {
    "CIFAR-10": "paper-cifar10-cnn",
    "Fashion-MNIST": "paper-rotated-fashion-mnist",
    "MNIST": "paper-rotated-mnist",
    "FEMNIST": "paper-femnist",
    "digits": "digits-methods",
}
WHAT_A_CLIENT_GETS = {
    "FLowDUP": "its own model, in a subspace",
    "FLowDUP+": "its own model, near one trained for all, its class shares known",
    "FLowDUP + calibrated EM": "as FLowDUP, its class shares found by EM",
    "FedAvg": "the model that everyone gets",
    "FedProx": "the same, with a proximal term",
    "LD-FedAvg": "the same, trained in a subspace",
    "FedAvg + calibrated EM": "FedAvg's model, its class shares found by EM",
    "FedAvg with logit adjustment + calibrated EM": "the same, trained to know class shares",
    "FedAvg with pseudo-labels + calibrated EM": "the same, trained by clients without labels, too",
    "FedAvg + Tent": "FedAvg's model after entropy minimisation",
    "FedTTA": "FedAvg's model after one step on a learned loss",
    "ATP": "FedAvg's model after an entropy step with learned rates",
    "LAME": "FedAvg's predictions, like points answered alike",
    "ARM-CML": "one model that also reads a summary of its points",
    "FLUX": "the model of its cluster, found without labels",
    "PeFLL": "its own model, all weights from a hypernetwork",
    "OD-PFL-HN": "the same, with a narrower encoder",
}


def methods(results: Results) -> str:
    """Where a tenth of the training clients has labels; what is sent is of the model for digits."""
    cells = {data: _cells(results, table) for data, table in DATA.items()}
    sent = cells["digits"]
    columns = {
        "": list(WHAT_A_CLIENT_GETS),
        "`method.name`": [f"`{sent[row]['method']}`" for row in WHAT_A_CLIENT_GETS],
        "what a client gets": list(WHAT_A_CLIENT_GETS.values()),
        **{data: _accuracies(found) for data, found in cells.items()},
        "MB sent up a round": [f"{sent[row]['bytes_up'] / 1e6:.2f}" for row in WHAT_A_CLIENT_GETS],
    }
    return grid(list(columns), zip(*columns.values(), strict=True))


def _cells(results: Results, table: str) -> dict[str, Cell]:
    cells = results.table(table)["cells"]
    return {cell["row"]: cell for cell in cells if cell["column"] == "p = 0.1"}


def _accuracies(cells: dict[str, Cell]) -> list[str]:
    """The best in bold; empty where a table has no such row, or it has not run."""
    found = [cells.get(row) for row in WHAT_A_CLIENT_GETS]
    texts = [spread_of(cell, "accuracy") if cell else "" for cell in found]
    return bold(texts, [mean_of(cell, "accuracy") if cell else None for cell in found], max)
