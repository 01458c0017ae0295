"""Certificates: bounds by every route, prediction sets, and the paper's bound by p and k."""

from collections.abc import Sequence
from typing import Any

from layout import Results, bold, grid, origins, tenths
from table import Result

SETS = {
    "rotated-mnist": "Rotated MNIST",
    "femnist": "FEMNIST",
    "class-partitioned-cifar10": "CIFAR-10",
}
METHODS = {"flowdup-plus": "FLowDUP+", "flowdup": "FLowDUP", "fedavg": "FedAvg"}
KINDS = ("", "-own", "-fitted", "-floor", "-quantile")


def _runs(results: Results) -> list[Result]:
    return [run for run in results.runs("certificate") if "failed" not in run]


def _main(results: Results) -> list[Result]:
    """The runs at p = 0.5 with the preset's k, by set and method."""
    found = {
        (run["set"], run["method"]): run
        for run in _runs(results)
        if run["p"] == 0.5 and "-k-" not in run["case"] and "further" not in run["case"]
    }
    return [found[key] for s in SETS for m in METHODS if (key := (s, m)) in found]


def _row(run: Result, route: str) -> dict[str, Any]:
    found: dict[str, Any] = next((r for r in run["certificate"] if r["route"] == route), {})
    return found


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _best_pac_bayes(run: Result) -> dict[str, Any]:
    rows = [r for r in run["certificate"] if r["route"].startswith("pac-bayes") and r["bound"]]
    return min(rows, key=lambda row: float(row["bound"]), default={})


def certificates(results: Results) -> str:
    """Every set and method: what is bounded, and by how much."""
    head = ["", "measured", "`held-out-clients`", "`client-quantile`, 90 %", "best PAC-Bayes"]
    body = []
    for run in _main(results):
        best = _best_pac_bayes(run)
        bounds = [
            _row(run, route).get("bound") for route in ("held-out-clients", "client-quantile")
        ]
        text = f"{_number(best['bound'])} (`{best['route']}`)" if best else ""
        name = f"{SETS[run['set']]}, {METHODS[run['method']]}"
        body.append([name, _number(run["measured"]["test"]), *map(_number, bounds), text])
    return f"{grid(head, body)}\n{origins(_main(results))}"


def prediction_sets(results: Results) -> str:
    """Coverage in %, its worst decile over clients, and the mean size of a set, over draws of who
    calibrates.
    """
    head = ["", *(f"`{kind}`" if kind else "plain" for kind in KINDS)]
    body = []
    for run in _main(results):
        terms = [_row(run, f"prediction-sets{kind}").get("terms", {}) for kind in KINDS]
        name = f"{SETS[run['set']]}, {METHODS[run['method']]}"
        body.append([name, *(_quality(own.get("redrawn", {})) for own in terms)])
    return grid(head, body)


def _quality(found: dict[str, Any]) -> str:
    if not found:
        return ""
    shares = (tenths(100 * found[key]) for key in ("coverage", "worst_decile"))
    return " / ".join([*shares, f"{found['size']:.2f}"])


def pac_bayes(results: Results) -> str:
    """Every version of the paper's bound on Rotated MNIST, beside held-out clients."""
    wanted = ("rotated-mnist-flowdup-p-0.5", "rotated-mnist-flowdup-p-0.5-further")
    plain, further = ([run for run in _runs(results) if run["case"] == name] for name in wanted)
    body = []
    for run, routes in (
        (plain, ("held-out-clients", "pac-bayes")),
        (further, ("pac-bayes-prior",)),
    ):
        for row in run[0]["certificate"] if run else ():
            if row["route"].startswith(routes):
                numbers = (row[k] for k in ("empirical_risk", "bound", "measured_error_unlabeled"))
                body.append(
                    [f"`{row['route']}`", _divergence(row["terms"]), *map(_number, numbers)]
                )
    return grid(["", "divergence, nats", "starts from", "at most", "measured"], body)


def _divergence(terms: dict[str, Any]) -> str:
    found = terms.get("code_nats", terms.get("divergence"))
    return "" if found is None else f"{found:,.0f}" if found >= 100 else f"{found:.2g}"


def by_k(results: Results) -> str:
    """Accuracy against complexity, for each dimension of the subspace."""
    runs = [r for r in _runs(results) if r["case"].startswith("rotated-mnist-flowdup-p-0.5")]
    runs = sorted((r for r in runs if "further" not in r["case"]), key=lambda run: int(run["k"]))
    head = ["k", "accuracy, %", "divergence", "complexity C", "theorem 1", "code, nats"]
    accuracies = [100 - 100 * run["measured"]["test"] for run in runs]
    texts = bold([tenths(a) for a in accuracies], accuracies, max)
    return grid(head, [[f"{r['k']:,}", a, *_costs(r)] for r, a in zip(runs, texts, strict=True)])


def _costs(run: Result) -> list[str]:
    plain, code = (_row(run, f"pac-bayes-{name}") for name in ("plain", "compression"))
    costs = [plain["terms"]["divergence"], plain["terms"]["complexity"]]
    return [
        *(f"{c:,.0f}" for c in costs),
        f"{plain['bound']:.2f}",
        f"{code['terms']['code_nats']:,.0f}",
    ]


def by_p(results: Results) -> str:
    """The bounds against the share of clients with labels."""
    runs = [
        r
        for r in _runs(results)
        if r["set"] == "rotated-mnist"
        and r["method"] == "flowdup"
        and "-k-" not in r["case"]
        and "further" not in r["case"]
    ]
    head = ["p", "error", "`held-out-clients`", "`pac-bayes-plain`", "`pac-bayes-held-out`"]
    body = [
        [str(run["p"]), _number(run["measured"]["test"]), *_bounds(run, head[2:])]
        for run in sorted(runs, key=lambda run: float(run["p"]))
    ]
    return grid(head, body)


def _bounds(run: Result, routes: Sequence[str]) -> list[str]:
    return [_number(_row(run, route.strip("`")).get("bound")) for route in routes]
