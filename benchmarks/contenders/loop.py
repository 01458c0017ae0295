"""A plain loop over the cohort, as one writes it without a simulator."""

import torch

from contenders.entry import Entry, Pace
from contenders.program import program, resident, train


def run(entry: Entry, pace: Pace) -> None:
    server, local, clients = program(entry), program(entry), resident(entry)
    visits = entry.work.visits(entry.rounds, entry.device)
    pace.ready()
    for cohort in visits:
        states = []
        for number, order in cohort:
            x, y = clients[number]
            local.load_state_dict(server.state_dict())
            train(local, x[order], y[order], entry.work)
            states.append({n: p.clone() for n, p in local.state_dict().items()})
        mean = {n: torch.stack([s[n] for s in states]).mean(0) for n in states[0]}
        server.load_state_dict(mean)
        pace(server.psi)
