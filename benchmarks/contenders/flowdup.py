"""flowdup: a round is one of `server.train`, with its cohort, batch plans and server's step."""

from importlib.metadata import version

from contenders.entry import Entry, Pace
from contenders.work import STREAM
from flowdup.engines import EngineConfig, build_engine
from flowdup.server import initial_state, train


def run(entry: Entry, pace: Pace) -> None:
    work, method = entry.work, entry.work.build(entry.device)
    named = {"name": entry.variant} if entry.variant else {}
    config = EngineConfig(device=entry.device, **named)
    engine = build_engine(config, method, work.local)
    server, clients = work.server(entry.rounds), work.population()
    state = initial_state(server, method, STREAM, config.torch_device(), config.torch_dtype())
    pace.ready(flowdup=version("flowdup"))
    for result in train(server, method, engine, clients, state, STREAM):
        psi = result.state.psi
        pace(lambda psi=psi: psi)
