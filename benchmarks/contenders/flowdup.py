"""flowdup: a round is one of `server.train`, with its cohort, batch plans and server's step."""

from typing import Any

from contenders.entry import Entry, Pace
from contenders.work import STREAM
from flowdup.engines import ENGINES, EngineConfig, build_engine
from flowdup.server import initial_state, train


def run(entry: Entry, pace: Pace) -> None:
    work, config = entry.work, EngineConfig(device=entry.device, **settings(entry.variant))
    method = work.build(entry.device, config.compute_dtype())
    engine = build_engine(config, method, work.local, work.population(), STREAM)
    server = work.server(entry.rounds)
    state = initial_state(server, method, STREAM, config.torch_device(), config.torch_dtype())
    pace.ready()
    for result in train(server, method, engine, state, STREAM):
        psi = result.state.psi
        pace(lambda psi=psi: psi)


def settings(variant: str) -> dict[str, Any]:
    """Of the engine, in words: its name, a precision, or "eager" for nothing compiled."""
    found: dict[str, Any] = {}
    for word in variant.split():
        if word in ENGINES:
            found["name"] = word
        elif word == "eager":
            found["compile"] = False
        else:
            found["precision"] = word
    return found
