"""Prediction sets from what models said: `python benchmarks/certificate_sets.py FOLDER`, where
`certificate.py` has written certificate.json and answers-*.npz; adds to certificate.json

- versions of sets that are younger than the run, measured on the test clients (`from` in their
  terms is "answers"; made anew each time);
- each version over 100 draws of who calibrates and who is tested, among the clients set aside and
  the test clients, none of which training has used: one draw alone moves coverage by a percent.

Answers have the likeliest classes alone, in float16; the rest of a point's probability is spread
evenly.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowdup.certificate.checks import Numbers
from flowdup.certificate.own_thresholds import FittedLevels, own_levels
from flowdup.certificate.prediction_sets import (
    floor_threshold,
    label_scores,
    probability_scores,
    quantile_of_quantiles,
    split_threshold,
)
from flowdup.data import ClientData
from flowdup.evaluation import summarize
from flowdup.files import write_atomic
from flowdup.run.certify_routes import Answers, MakeScores, Row, set_rows

DRAWS = 100
COVERAGE, DELTA = 0.9, 0.05


def read_answers(stored: Any, case: str, group: str) -> Answers:
    """Logits are logarithms of probabilities here."""
    names = ("sizes", "y", "log_p_y", "classes", "log_p", "log_shares")
    sizes, y, of_label, classes, logs, shares = (stored[f"{case}/{group}-{n}"] for n in names)
    p = np.exp(logs.astype(np.float64))
    others = shares.shape[1] - p.shape[1]
    rest = np.maximum(1 - p.sum(1, keepdims=True), 1e-12) / max(others, 1)
    table = np.repeat(rest, shares.shape[1], axis=1)
    np.put_along_axis(table, classes.astype(np.int64), p, axis=1)
    left_out = np.flatnonzero((classes != y[:, None]).all(1) & (y >= 0))
    table[left_out, y[left_out]] = np.exp(of_label[left_out].astype(np.float64))
    logits = torch.from_numpy(np.log(np.maximum(table, 1e-30)))
    parts = torch.split(logits, sizes.tolist())
    labels = torch.split(torch.from_numpy(y.astype(np.int64)), sizes.tolist())
    x = [torch.zeros(len(own), 1) for own in labels]  # nobody looks at inputs here
    return Answers(parts, [ClientData(*pair) for pair in zip(x, labels, strict=True)])


def versions(
    validation: Answers,
) -> Iterator[tuple[str, MakeScores, Callable[[Sequence[Numbers]], float]]]:
    """How scores are made, and a threshold of them."""

    def split(scores: Sequence[Numbers]) -> float:
        return split_threshold(scores, COVERAGE)

    fitted = FittedLevels.fit(validation.probabilities(), validation.labels, COVERAGE).scores
    yield "", probability_scores, split
    yield "-own", own_levels, split
    yield "-fitted", fitted, split
    yield "-floor", fitted, lambda scores: floor_threshold(scores, COVERAGE)
    yield "-quantile", probability_scores, lambda scores: quantile_of_quantiles(scores, COVERAGE)


def redrawn(
    make: MakeScores,
    threshold: Callable[[Sequence[Numbers]], float],
    aside: Answers,
    test: Answers,
) -> dict[str, float]:
    """Means over draws."""
    tables = [*aside.scores(make), *test.scores(make)]
    right = [label_scores(s, y) for s, y in zip(tables, [*aside.y, *test.y], strict=True)]
    every = [np.sort(table, axis=None) for table in tables]
    found = []
    for number in range(DRAWS):
        order = np.random.default_rng([18, number]).permutation(len(right))
        calibrating, tested = order[: len(aside.y)], order[len(aside.y) :]
        limit = threshold([right[i] for i in calibrating])
        coverage = summarize([float((right[i] <= limit).mean()) for i in tested])
        sizes = [np.searchsorted(every[i], limit, "right") / len(right[i]) for i in tested]
        found.append((coverage.mean or 0.0, coverage.worst_decile or 0.0, float(np.mean(sizes))))
    means = np.mean(found, 0).tolist()
    return {"draws": DRAWS, **dict(zip(("coverage", "worst_decile", "size"), means, strict=True))}


def renewed(run: dict[str, Any], stored: Any) -> dict[str, Any]:
    """A run with all versions of sets."""
    case = run["case"]
    groups = ("validation", "certify", "test")
    validation, aside, test = (read_answers(stored, case, group) for group in groups)
    rows: dict[str, dict[str, Any]] = {row["route"]: row for row in run["certificate"]}
    data = f"{len(aside.y)} clients set aside"
    made: list[Row] = [*set_rows(aside, test, validation, data, DELTA, COVERAGE)]
    for row in made:
        if row.route not in rows or rows[row.route]["terms"].get("from") == "answers":
            rows[row.route] = asdict(row) | {"terms": row.terms | {"from": "answers"}}
    for version, make, threshold in versions(validation):
        terms = rows[f"prediction-sets{version}"]["terms"]
        terms["redrawn"] = redrawn(make, threshold, aside, test)
    places = ("held-out", "client-quantile", "prediction-sets", "pac-bayes")
    order = sorted(rows.values(), key=lambda r: [r["route"].startswith(p) for p in places][::-1])
    return run | {"certificate": order}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    file = folder / "certificate.json"
    runs: list[dict[str, Any]] = json.loads(file.read_bytes())
    for place, run in enumerate(runs):
        answers = folder / f"answers-{run.get('set')}.npz"
        if answers.is_file():
            with np.load(answers) as stored:
                if f"{run['case']}/test-y" in stored.files:
                    runs[place] = renewed(run, stored)
                    print(run["case"], flush=True)
    write_atomic(file, json.dumps(runs, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
