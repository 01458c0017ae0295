"""What `cpu.py` and `gpu.py` share: options, one match after another, results as they come."""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkout import HERE
from contest import Match, Result, compete
from table import markdown

from flowdup.files import write_atomic

TINY: Any = {"model": "cnn-small", "points": 20, "clients": 3, "cohort": 2, "batch": 10, "k": 100}


def options(
    description: str, matches: dict[str, Match], device: str, *more: str
) -> argparse.ArgumentParser:
    """`more`: works that are no matches."""
    parser = argparse.ArgumentParser(description=description)
    works = [*matches, *more]
    everyone = list(dict.fromkeys(name for match in matches.values() for name in match.contenders))
    parser.add_argument("--works", nargs="+", choices=works, default=works)
    parser.add_argument("--contenders", nargs="+", choices=everyone, default=everyone)
    parser.add_argument("--device", default=device)
    parser.add_argument("--processes", type=int, default=1, help="of each contender, in turn")
    parser.add_argument("--tiny", action="store_true", help="see that it runs, measure nothing")
    parser.add_argument(
        "--against", type=checkout, metavar="DIR", help="another checkout, run beside this one"
    )
    file = HERE / "benchmarks/results" / ("cpu.json" if device == "cpu" else "gpu.json")
    parser.add_argument("--out", type=Path, default=file)
    return parser


def checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not all((path / part).is_dir() for part in ("src/flowdup", "benchmarks/contenders")):
        raise argparse.ArgumentTypeError(f"{path} is no checkout of flowdup")
    return path


def play(matches: dict[str, Match], chosen: argparse.Namespace) -> Iterator[list[Result]]:
    for title, match in matches.items():
        names = {n: c for n, c in match.contenders.items() if n in chosen.contenders}
        if title in chosen.works and names:
            plan = replace(match.plan, processes=chosen.processes)
            some = replace(match, contenders=names, plan=plan)
            some = tiny(some) if chosen.tiny else some
            yield compete(title, some, chosen.device, chosen.against)


def tiny(match: Match) -> Match:
    plan = replace(match.plan, threads=1, warm_up=2, blocks=2, rounds=2)
    return replace(match, work=replace(match.work, **TINY), plan=plan)


def report(works: Iterable[list[Result]], out: Path) -> None:
    """Write and print every work's results when they are there; at the end, fail if one should."""
    results: list[Result] = []
    for found in works:
        results += found
        write_atomic(out, (json.dumps(results, indent=2) + "\n").encode())
        print(markdown(found), flush=True)
    wrong = [
        f"{row['work']}, {row['contender']}: {row[key]}"
        for row in results
        for key in ("failed", "mismatch")
        if key in row
    ]
    if wrong:
        raise SystemExit("\n".join(wrong))
