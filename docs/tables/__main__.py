"""Writes the tables of figures in README.md and docs/ from the result files: `make tables`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of TABLES below.
With --check nothing is written, and a stale table is an error.  Keys of a result that no table
asks for are ignored; where one is missing, the cell stays empty.
"""

import argparse
import re
import sys
from collections.abc import Callable
from difflib import unified_diff
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE / "benchmarks"))

from accuracy import demo, in_detail, precision, privacy  # noqa: E402
from certified import by_k, by_p, certificates, pac_bayes, prediction_sets  # noqa: E402
from deployment import foreign, set_sizes  # noqa: E402
from layout import Results  # noqa: E402
from methods import methods  # noqa: E402
from reproduced import reproduced  # noqa: E402
from scores import against_the_paper, scores  # noqa: E402
from speed import (  # noqa: E402
    across_machines,
    benched,
    browser,
    personalizing,
    population,
    rounds,
    start_up,
)

MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: dict[str, Callable[[Results], str]] = {
    "browser": browser,
    "demo": demo,
    "methods": methods,
    "precision": precision,
    "privacy": privacy,
    "round-gpu": partial(
        rounds,
        file="gpu",
        cohort=100,
        works={
            "flowdup cnn": "FLowDUP",
            "fedavg cnn": "FedAvg",
            "fedavg cnn femnist": "FedAvg, FEMNIST-shaped",
            "flowdup resnet18": "FLowDUP, both networks ResNet18",
        },
        columns={
            "flowdup bf16": "flowdup, bf16",
            "flowdup": "flowdup, TF32",
            "pfl": "pfl {pfl}",
            "loop": "plain loop",
        },
    ),
    "round-cpu": partial(
        rounds,
        file="cpu",
        cohort=20,
        works={"flowdup cnn": "FLowDUP", "fedavg cnn": "FedAvg"},
        columns={
            "flowdup": "flowdup",
            "pfl": "pfl {pfl}",
            "flower": "Flower {flwr}",
            "loop": "plain loop",
        },
    ),
    "round-busy": partial(
        rounds,
        file="busy-core",
        cohort=20,
        works={"flowdup cnn": "FLowDUP", "fedavg cnn": "FedAvg"},
        columns={"flowdup": "flowdup", "pfl": "pfl {pfl}"},
    ),
    "certificates": certificates,
    "certified-sets": prediction_sets,
    "certified-pac-bayes": pac_bayes,
    "certified-k": by_k,
    "certified-p": by_p,
    "start-up": start_up,
    "federation": across_machines,
    "personalizing": personalizing,
    "population": population,
    "bench-cpu": partial(benched, file="cpu"),
    "bench-gpu": partial(benched, file="gpu"),
    "set-sizes": set_sizes,
    "foreign": foreign,
    "main": partial(scores, columns=("p = 0.1", "p = 1.0")),
    "scores": scores,
    "against-the-paper": against_the_paper,
    "reproduced": reproduced,
    "detail-subspace-kinds": partial(in_detail, file="subspace-kinds"),
}


def filled(file: Path, results: Results) -> str:
    """The file's text with every table written anew."""
    text = file.read_text()
    if text.count("<!-- table:") != len(MARKED.findall(text)):
        raise SystemExit(f"{file}: a table begins that has no '<!-- end -->' or no name")

    def table(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            names = ", ".join(TABLES)
            raise SystemExit(f"{file}: no table is called '{found[2]}': use one of {names}")
        return f"{found[1]}\n{TABLES[found[2]](results)}\n{found[3]}"

    return MARKED.sub(table, text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tables of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if one is stale")
    parser.add_argument("--root", type=Path, default=HERE, help="of the checkout")
    chosen = parser.parse_args()
    results, stale = Results(chosen.root), []
    for file in [chosen.root / "README.md", *sorted((chosen.root / "docs").rglob("*.md"))]:
        old, new = file.read_text(), filled(file, results)
        if old != new and chosen.check:
            print(*unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0), sep="\n")
            stale.append(file.name)
        elif old != new:
            file.write_text(new)
    if stale:
        raise SystemExit(f"stale tables in {', '.join(stale)}: run `make tables`")


if __name__ == "__main__":
    main()
