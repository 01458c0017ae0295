"""How long a round takes on a CPU, here and elsewhere: `make bench`.

Every contender does the same work: the same clients, cohorts and orders of points, float32, all
cores.  psi after the first round is compared, and a contender that is further than 1e-4 from the
others ends the run.  ratio_to_pfl and ratio_to_flower (the faster of its two variants) say how many
times as fast a contender is, ratio_to_h1 how many times as long as one forward pass of h1 a
personalisation takes; all within the run.
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

from chart import draw, show
from contenders.work import Work
from contest import PERSONALIZERS, SIMULATORS, Plan, compete

from flowdup.files import write_atomic

ROOT = Path(__file__).parents[1]
WORKS = {
    "fedavg cnn": Work("fedavg"),
    "flowdup cnn": Work("flowdup", lr=5e-4),  # without clipping, 0.01 makes psi explode
    "fedavg cnn femnist": Work(
        "fedavg",
        shape=(1, 28, 28),
        classes=62,
        classes_per_client=62,
        points=180,
        ragged=True,
        cohort=10,
        batch=20,
    ),
    "personalize cnn": Work("flowdup", clients=1),
}
TINY = {"model": "cnn-small", "points": 20, "clients": 3, "cohort": 2, "batch": 10, "k": 100}
BUSY = 0.5  # mean number of running processes


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a round takes on a CPU.")
    everyone = [*SIMULATORS, *PERSONALIZERS]
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--contenders", nargs="+", choices=everyone, default=everyone)
    parser.add_argument("--tiny", action="store_true", help="see that it runs, measure nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/bench-cpu.png")
    chosen = parser.parse_args()
    if os.getloadavg()[0] > BUSY and not chosen.tiny:
        print("The machine is busy with something else: these figures will not be worth much.")
    results = []
    for title in chosen.works:
        work, personal = WORKS[title], title.startswith("personalize")
        plan = Plan(warm_up=10, blocks=20, rounds=5) if personal else Plan()
        if chosen.tiny:
            work, plan = replace(work, **TINY), Plan(threads=1, warm_up=1, blocks=2, rounds=1)
        table = PERSONALIZERS if personal else SIMULATORS
        names = {name: table[name] for name in chosen.contenders if name in table}
        if names:
            found = compete(title, work, names, plan)
            show(found)
            results += found
    write_atomic(chosen.out, (json.dumps(results, indent=2) + "\n").encode())
    draw(results, chosen.plot)


if __name__ == "__main__":
    main()
