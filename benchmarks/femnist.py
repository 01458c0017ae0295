"""How long FEMNIST takes to load, what memory it takes, and what its raggedness costs the batched
engine: `python benchmarks/femnist.py`, with FLOWDUP_DATA pointing to the data.
"""

import json
import resource
import statistics
import time

import torch

from flowdup.aggregation import mean
from flowdup.client import ClientConfig
from flowdup.config import load_config
from flowdup.data import load_population
from flowdup.engines import EngineConfig, build_engine
from flowdup.messages import Task
from flowdup.methods import MethodConfig, MethodContext
from flowdup.provenance import provenance
from flowdup.random import Stream

COHORTS, SIZE, BATCH = 20, 100, 20


def main() -> None:
    before = _peak()
    start = time.monotonic()
    population = load_population(load_config("femnist").data, Stream(0).child("data"))
    seconds, peak = time.monotonic() - start, _peak()
    clients = [*population.train, *population.validation, *population.test]
    method = MethodConfig.from_table({"name": "fedavg"}).build(
        MethodContext("mlp", population.spec, Stream(0))
    )
    config = ClientConfig(batch_size=BATCH)
    engine = build_engine(
        EngineConfig("batched", "cpu"), method, config, population.train, Stream(0)
    )
    psi, padding, unsorted = method.init(Stream(0)), [], []
    for number in range(COHORTS):
        chosen = Stream(number).child("cohort").integers(SIZE, len(population.train))
        cohort = dict(enumerate(chosen.tolist()))
        update = mean(psi, engine.train(Task(number, psi, {}, cohort)))
        padding.append(update.padding)
        sizes = [len(population.train[i]) for i in chosen]
        unsorted.append(1 - sum(sizes) / (SIZE * BATCH * -(-max(sizes) // BATCH)))
    result = {
        "writers": len(clients),
        "images": sum(map(len, clients)),
        "load_seconds": round(seconds, 2),
        "pixels_mb": round(sum(c.x.numel() for c in clients) / 1e6),
        "peak_mb": round(peak),
        "peak_mb_before": round(before),
        "padding": {"mean": statistics.fmean(padding), "most": max(padding)},
        "padding_if_all_were_padded_to_the_longest": statistics.fmean(unsorted),
        **provenance(torch.device("cpu")),
    }
    print(json.dumps(result, indent=2))


def _peak() -> float:
    """Resident memory at its highest, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    main()
