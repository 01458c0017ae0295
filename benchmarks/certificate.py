"""Certificates on image sets: `python benchmarks/certificate.py --device cuda --jobs 6`, with
FLOWDUP_DATA pointing to MNIST, CIFAR-10 and FEMNIST; writes certificate.json into --out.

Of each set FLowDUP, FLowDUP+ and FedAvg are trained at p = 0.5, with clients set aside, and
certified by every route.  Then Rotated MNIST again: from a prior that had fewer labels, at other p,
and with other dimensions k of the subspace, for the complexity of the bound against accuracy.  The
most important cases come first.  A case is a process of its own; one that is finished in --runs is
not done again, certificate.json is written after every case, and --limit ends what is still
running.  Beside it, answers-NAME.npz has what models say of the clients set aside and of test
clients, from which sets of other kinds can be made.  `--small` is for a CPU: small networks and few
rounds; `--tiny` only shows that everything runs.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowdup.config import Config, load_config
from flowdup.data import ClientData
from flowdup.errors import FlowdupError
from flowdup.evaluation import transductive_logits
from flowdup.files import write_atomic
from flowdup.prior import log_prior
from flowdup.run import RunFolder, Simulation, certify_run, train_run

ROOT = Path(__file__).parents[1]
KEPT = 10  # classes of a point whose probabilities are kept, if there are no more; else fewer
SGD = ("server.optimizer.name=sgd", "server.optimizer.lr=1.0", "server.lr_decay_fraction=0.0")
SETS = {
    "rotated-mnist": (
        *("data.train_clients=450", "data.certify_clients=100", 'data.stratified=["validation"]'),
        "server.rounds=700",
    ),
    "femnist": ("data.certify_clients=360", "server.rounds=300"),  # of many local steps each
    "class-partitioned-cifar10": (
        *("data.certify_clients=100", 'data.stratified=["validation"]', "server.rounds=800"),
    ),
}


def _plus(before: int, after: int) -> tuple[str, ...]:
    return (
        *(f"server.rounds={after}", "server.alpha=0.7"),
        'before=[{method={name="fedavg-pseudo", correction="em", init_scale=0.41}, '
        f"server={{rounds={before}, alpha=0.5, warm_up=0, lr_decay_fraction=0.0}}}}]",
    )


METHODS: dict[str, dict[str, tuple[str, ...]]] = {  # as experiments/paper-*.toml have found them
    "flowdup": {"class-partitioned-cifar10": ("server.optimizer.lr=0.0005",)},
    "fedavg": {
        "rotated-mnist": ("client.optimizer.lr=0.3", *SGD),
        "femnist": ("client.optimizer.lr=0.1", *SGD),
        "class-partitioned-cifar10": ("client.optimizer.lr=0.1", *SGD),
    },
    "flowdup-plus": {
        "rotated-mnist": _plus(300, 500),
        "femnist": _plus(150, 200),
        "class-partitioned-cifar10": (*_plus(300, 500), "method.pseudo_labels=true"),
    },
}
FRACTIONS = (0.8, 0.1)
DIMENSIONS = (200, 1000, 5000, 500, 2000)  # besides the preset's 10,000
PRIOR = 0.2  # p of the run that a prior comes from
FURTHER = (  # rounds of the run that begins there: few and small steps, each of which is paid for
    *("server.rounds=20", "server.optimizer.name=sgd", "server.optimizer.lr=0.3"),
    *("server.lr_decay_fraction=0.0", "run.evaluate_every=10"),
)
SMALL = {
    "small": ("server.rounds=120", "server.cohort=30", "run.evaluate_every=40"),
    "tiny": (
        *("server.rounds=2", "server.cohort=10", "run.evaluate_every=1"),
        *("data.validation_clients=20", "data.test_clients=30", "data.certify_clients=40"),
    ),
}


@dataclass(frozen=True)
class Case:
    """One run and its certificate."""

    set: str
    method: str = "flowdup"
    p: float = 0.5
    k: int | None = None
    settings: tuple[str, ...] = ()
    about: str = ""
    prior: str = ""  # the name of the case whose psi it begins from

    @property
    def name(self) -> str:
        parts = (self.set, self.method, f"p-{self.p}", f"k-{self.k}" if self.k else "", self.about)
        return "-".join(filter(None, parts))

    def config(self, given: argparse.Namespace) -> Config:
        plus = self.method == "flowdup-plus"
        texts = [*SETS[self.set], f"data.labeled_fraction={self.p}"]
        texts += [f"method.name={self.method}"] if self.method == "fedavg" else []
        texts += [*METHODS[self.method].get(self.set, ()), *self.settings]
        texts += [f"method.subspace.k={self.k}"] if self.k else []
        texts += [f"prior={given.runs / self.prior}"] if self.prior else []
        texts += [f"engine.device={given.device}", f"engine.precision={given.precision}"]
        texts += ["run.evaluate_every=100"] if not self.prior else []
        for size in ("small", "tiny"):
            if getattr(given, size):
                texts += self._small(size)
        return load_config(f"{self.set}-plus" if plus else self.set, texts)

    def _small(self, size: str) -> list[str]:
        model = "cnn-small" if self.set == "rotated-mnist" else "cnn"
        k = ["method.subspace.k=1000"] if self.method != "fedavg" and not self.k else []
        clients = {"rotated-mnist": 120, "femnist": 100, "class-partitioned-cifar10": 100}
        few = [f"data.train_clients={clients[self.set]}"] if size == "tiny" else []
        short = _plus(1, 2)[-1:]
        before = short if self.method == "flowdup-plus" and size == "tiny" else ()
        return [*SMALL[size], f"model={model}", *k, *few, *before]


def cases() -> Iterator[Case]:
    """The most important first."""
    mnist, writers, images = SETS
    yield from (Case(mnist, method) for method in ("flowdup-plus", "flowdup", "fedavg"))
    yield from (Case(writers, method) for method in ("flowdup-plus", "flowdup", "fedavg"))
    yield from (Case(images, method) for method in ("flowdup-plus", "flowdup", "fedavg"))
    prior = Case(mnist, p=PRIOR)
    yield prior
    yield Case(mnist, settings=FURTHER, about="further", prior=prior.name)
    yield from (Case(mnist, k=k) for k in DIMENSIONS[:3])
    yield from (Case(mnist, p=p) for p in FRACTIONS)
    yield from (Case(mnist, k=k) for k in DIMENSIONS[3:])


def work(case: Case, given: argparse.Namespace) -> dict[str, Any]:
    """Train what is left to train, certify it, and keep its answers."""
    folder, began = RunFolder(given.runs / case.name), time.monotonic()
    config, resumed = case.config(given), folder.started
    for metrics in train_run(config, folder.path, resume=resumed):
        if "validation_accuracy" in metrics:
            print(json.dumps(metrics), flush=True)
    trained = time.monotonic()
    found = certify_run(folder.path, draws=given.draws)
    certified = time.monotonic()
    for row in found["certificate"]:  # thousands of numbers that nothing here needs
        row["terms"].pop("curve", None)
    simulation, state = Simulation.resume(config, folder.kept)
    answers: dict[str, Any] = {}
    for group in ("validation", "certify", "test"):
        clients = getattr(simulation.population, group)
        logits = transductive_logits(simulation.engine, state.deployed, clients)
        answers |= {f"{group}-{n}": a for n, a in compact(logits, clients).items()}
    with (given.runs / f"{case.name}.npz.part").open("wb") as file:
        np.savez_compressed(file, **answers)
    (given.runs / f"{case.name}.npz.part").replace(given.runs / f"{case.name}.npz")
    return {
        "case": case.name,
        "set": case.set,
        "p": case.p,
        "k": config.method.table().get("subspace", {}).get("k"),
        "rounds": config.rounds,
        "seconds": ({} if resumed else {"training": round(trained - began, 1)})
        | {"certificate": round(certified - trained, 1)},  # a part of training says nothing
        **{key: value for key, value in found.items() if key != "levels"},
    }


def compact(logits: Sequence[torch.Tensor], clients: Sequence[ClientData]) -> dict[str, Any]:
    """log p of the likeliest classes and of the label, and all that label shares by EM change."""
    ones = [torch.ones(len(own), dtype=own.dtype) for own in logits]
    shifts = [log_prior(own, one) for own, one in zip(logits, ones, strict=True)]
    logs = [own.log_softmax(1) for own in logits]
    changed = [(own + s).logsumexp(1) for own, s in zip(logs, shifts, strict=True)]
    table, y = torch.cat(logs), torch.cat([client.labels for client in clients])
    values, classes = table.topk(KEPT if table.shape[1] <= KEPT else KEPT - 2, dim=1)
    return {
        "sizes": np.array([len(client) for client in clients], np.int32),
        "y": y.numpy().astype(np.int16),
        "log_p_y": table.gather(1, y.clamp(min=0)[:, None])[:, 0].numpy().astype(np.float16),
        "classes": classes.numpy().astype(np.uint8),
        "log_p": values.numpy().astype(np.float16),
        "log_shares": torch.stack(shifts).numpy().astype(np.float16),
        "log_sum": torch.cat(changed).numpy().astype(np.float16),
    }


def run_all(given: argparse.Namespace) -> None:
    """Cases as processes, --jobs at a time, until all are done or the time is over."""
    end, waiting = time.monotonic() + given.limit, [*chosen(given)]
    running: dict[str, subprocess.Popen[bytes]] = {}
    names = {case.name for case in waiting}
    while waiting or running:
        for case in [*waiting]:
            ready = case.prior not in names or is_done(case.prior, given)
            if ready and len(running) < given.jobs:
                waiting.remove(case)
                if not is_done(case.name, given):
                    running[case.name] = start(case, given)
        ended = [name for name, process in running.items() if process.poll() is not None]
        for name in ended:
            code = running.pop(name).returncode
            print(f"{time.monotonic() - end + given.limit:.0f} s: {name} ended, {code}", flush=True)
            if not is_done(name, given):  # what begins from it cannot begin
                waiting = [case for case in waiting if case.prior != name]
        if ended:
            collect(given)
        if time.monotonic() > end:
            print(f"time is over: {[*running]} and {[c.name for c in waiting]}", flush=True)
            for process in running.values():
                process.kill()
            break
        time.sleep(0.2)
    collect(given)


def chosen(given: argparse.Namespace) -> list[Case]:
    return [case for case in cases() if not given.only or case.name in given.only]


def start(case: Case, given: argparse.Namespace) -> "subprocess.Popen[bytes]":
    words = [sys.executable, __file__, *sys.argv[1:], "--case", case.name]
    threads = max((os.cpu_count() or 1) // given.jobs, 1)
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    with (given.runs / f"{case.name}.log").open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment)


def is_done(name: str, given: argparse.Namespace) -> bool:
    runs: Path = given.runs
    return (runs / f"{name}.json").is_file()


def collect(given: argparse.Namespace) -> None:
    """certificate.json of the cases that are done, and answers by set; of the other cases, the end
    of what they said.
    """
    rows: list[dict[str, Any]] = []
    answers: dict[str, dict[str, Any]] = {name: {} for name in SETS}
    for case in cases():
        path = given.runs / case.name
        if is_done(case.name, given):
            rows.append(json.loads(path.with_name(f"{case.name}.json").read_text()))
            if case.k or case.prior:
                continue
            with np.load(path.with_name(f"{case.name}.npz")) as stored:
                answers[case.set] |= {f"{case.name}/{n}": stored[n] for n in stored.files}
        elif (log := path.with_name(f"{case.name}.log")).is_file():
            rows.append({"case": case.name, "failed": log.read_text()[-1500:]})
    write_atomic(given.out / "certificate.json", json.dumps(rows, indent=1).encode() + b"\n")
    for name, found in answers.items():
        if found:
            part = given.out / f"answers-{name}.part"
            with part.open("wb") as file:
                np.savez_compressed(file, **found)
            part.replace(part.with_suffix(".npz"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--limit", type=float, default=86_400, help="seconds for everything")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "certificate")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "certificate")
    parser.add_argument("--draws", type=int, default=1000, help="of the sampled predictor")
    parser.add_argument("--only", nargs="+", default=[], help="names of cases; all by default")
    parser.add_argument("--small", action="store_true", help="for a CPU")
    parser.add_argument("--tiny", action="store_true", help="to see whether it runs")
    parser.add_argument("--case", help="do this one, in this process")
    given = parser.parse_args()
    given.runs, given.out = given.runs.absolute(), given.out.absolute()
    for folder in (given.runs, given.out):
        folder.mkdir(parents=True, exist_ok=True)
    if not given.case:
        run_all(given)
        return
    (case,) = [case for case in cases() if case.name == given.case]
    try:
        result = work(case, given)
    except FlowdupError as error:
        sys.exit(str(error))
    write_atomic(given.runs / f"{case.name}.json", json.dumps(result).encode())


if __name__ == "__main__":
    main()
