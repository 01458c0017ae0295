"""How long a round takes on a GPU, here and elsewhere: `make bench-gpu`.

Every contender does the same work: the same clients, cohorts and orders of points, all data on the
GPU from the start; others than flowdup may use TF32 and cuDNN's search for the fastest kernel.  A
block of rounds is timed, from its first call until the GPU has done all, and divided by its rounds:
as many as fit in a second, 20 at most, one at least.  Personalisations are timed one by one.  The
first round is told apart: it compiles, or finds what an earlier run on the machine compiled.
psi after it is compared: further from the first contender's than 2 % of the way that it has come
(10 % in bf16) is other work, and the run fails at its end.  A contender that is absent or fails is
reported and the others go on; results are written after each work.

The machine's own torch is used.  Where nothing can be installed, `make peers` on another machine
makes `benchmarks/peers` (pfl and what it imports, pure Python); take it along, and `make bench-gpu`
finds it, as does `PYTHONPATH=src:benchmarks/peers python3 benchmarks/gpu.py`.  FLOWDUP_DATA names
the folder with CIFAR-10 for the whole run, which is in bf16, and FLOWDUP_COMMIT the commit where
there is no history.  --against DIR adds twins with another checkout's code, as in cpu.py
(FLOWDUP_COMMIT_BEFORE names their commit); their first round may find what the others compiled, and
with ResNet18, where contenders run alone, they run after the others and not in turns.
`python benchmarks/chart.py benchmarks/results/gpu.json docs/bench-gpu.png` draws, anywhere.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch
from bench import options, play, report
from contenders.work import Work
from contest import PERSONALIZERS, SIMULATORS, Contenders, Match, Plan, Result
from whole import whole_run

CONTENDERS: Contenders = {
    "flowdup": ("flowdup", ""),
    "flowdup bf16": ("flowdup", "bf16"),
    **{name: SIMULATORS[name] for name in ("pfl", "flower actors", "loop")},
}
LARGE = {name: CONTENDERS[name] for name in ("flowdup", "flowdup bf16", "pfl")}
STEPS = {name: c for name, c in PERSONALIZERS.items() if "Federation" not in name}
PLAN = Plan(warm_up=3, rounds=20, seconds=1.0, each=False)
FLOWDUP = Work("flowdup", clients=200, cohort=100, lr=5e-4)
MATCHES = {
    "flowdup cnn": Match(FLOWDUP, CONTENDERS, PLAN),
    "fedavg cnn": Match(Work("fedavg", clients=200, cohort=100), CONTENDERS, PLAN),
    "fedavg cnn femnist": Match(  # at a rate of 0.05, the many steps blow rounding up
        Work.femnist(clients=200, cohort=100, batch=20, lr=0.01),
        CONTENDERS,
        replace(PLAN, blocks=5),
    ),
    "personalize cnn": Match(
        replace(FLOWDUP, clients=1), STEPS, Plan(warm_up=20, blocks=20, rounds=5)
    ),
    "flowdup resnet18": Match(
        replace(FLOWDUP, model="resnet18"), LARGE, replace(PLAN, warm_up=2, blocks=3, alone=True)
    ),
}
WHOLE = "whole run cifar10 cnn"


def main() -> None:
    parser = options("How long a round takes on a GPU.", MATCHES, "cuda", WHOLE)
    parser.add_argument("--rounds", type=int, default=1000, help="of the whole run")
    chosen = parser.parse_args()
    if chosen.device != "cpu" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: try --tiny --device cpu")
    report(chain(play(MATCHES, chosen), whole(chosen)), chosen.out)


def whole(chosen: Namespace) -> Iterator[list[Result]]:
    if WHOLE in chosen.works:
        preset = "digits" if chosen.tiny else "class-partitioned-cifar10"
        rounds = f"server.rounds={chosen.rounds}"
        settings = [rounds, "run.evaluate_every=50", "engine.precision=bf16"]
        few = ["server.rounds=3", "data.train_clients=20", "data.validation_clients=5"]
        settings = few if chosen.tiny else settings
        yield whole_run(WHOLE, preset, settings, chosen.device, chosen.against)


if __name__ == "__main__":
    main()
