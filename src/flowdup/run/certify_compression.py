"""The paper's bound with a prior by compression: psi_h and clients' models of few different values.

psi_h - psi_h0 is replaced by one of L values for each number, and the length of the code is the
divergence of the hypernetwork (`certificate/compression.py`).  For new points clients' models v are
replaced in the same way, by one code for all of them, whose length is C.  Nothing is sampled.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowdup.certificate import pac_bayes
from flowdup.certificate.compression import compress
from flowdup.certificate.pac_bayes import Clients
from flowdup.data import ClientData
from flowdup.evaluation import transductive_logits
from flowdup.params import Params, pack, unpack
from flowdup.run.certify_routes import Answers, Row
from flowdup.run.stochastic import as_flowdup
from flowdup.run.trained import OWN_POINTS, RANDOM_LABELS, Trained

LEVELS = (2, 4, 16)  # values of a quantised psi_h


class _Coded(NamedTuple):
    """A quantised hypernetwork; the least is the best."""

    bound: float
    risk: float  # where all bounds say nothing, this decides
    levels: int
    nats: float
    psi: Params
    found: pac_bayes.Bound


def compressed_rows(run: Trained, initial: Params, clients: Clients) -> Iterator[Row]:
    """About unlabeled clients' own points, and about new points of all."""
    best = min(_coded(run, initial, clients), key=lambda coded: coded[:3])
    data = f"{clients.labeled} of {clients.all} training clients"
    numbers = sum(p.numel() for n, p in best.psi.items() if n.startswith("h"))
    code = {"levels": best.levels, "code_nats": best.nats, "numbers": numbers}
    yield Row(
        "pac-bayes-compression",
        data,
        best.found.terms["unlabeled"],
        run.delta,
        f"{RANDOM_LABELS}; {OWN_POINTS}, by a quantised psi_h",
        best.risk,
        run.error_unlabeled(best.psi),
        best.found.terms | code,
    )
    v, nats = _coded_models(run, best)
    risk = _risk(run, v, labeled=True)
    share = run.delta / len(LEVELS)
    if equal := clients.points == round(clients.points):
        found = pac_bayes.kl_bound(risk, best.nats, nats, clients, share)
    else:
        found = pac_bayes.theorem_a1(risk, best.nats, [nats], clients, share)
    yield Row(
        "pac-bayes-compression-models",
        data,
        found.bound,
        run.delta,
        f"{RANDOM_LABELS}; about new points of all training clients, by a quantised psi_h and "
        f"quantised models{'; clients have equally many points' if equal else ''}",
        risk,
        _risk(run, v, labeled=False),
        found.terms | code | {"models_nats": nats, "k": run.k},
    )


def _coded(run: Trained, initial: Params, clients: Clients) -> Iterator[_Coded]:
    names = [n for n in run.psi if n.startswith("h")]
    moved = {n: run.psi[n].cpu() - initial[n].cpu() for n in names}
    for levels in LEVELS:
        code = compress(pack(moved).double().numpy(), levels)
        change = unpack(torch.from_numpy(code.values).float(), moved)
        psi = run.psi | {n: initial[n] + change[n].to(initial[n]) for n in names}
        logits = transductive_logits(run.simulation.engine, psi, run.labeled)
        risk = float(np.mean(Answers(logits, run.labeled).errors))
        found = pac_bayes.transductive_bound(risk, code.nats, clients, run.delta / len(LEVELS))
        yield _Coded(found.bound, risk, levels, code.nats, psi, found)


def _coded_models(run: Trained, coded: _Coded) -> tuple[Tensor, float]:
    """Quantised v [clients, k] of everyone, and the length of their code."""
    method = as_flowdup(run.simulation.method)
    device = next(iter(coded.psi.values())).device
    with torch.no_grad():
        models = [
            method.h(coded.psi, c.x.to(device), torch.ones(len(c), device=device)).cpu()
            for c in run.train
        ]
    code = compress(torch.stack(models).double().numpy(), coded.levels)
    return torch.from_numpy(code.values).float().view(len(models), -1).to(device), code.nats


@torch.no_grad()
def _risk(run: Trained, models: Tensor, labeled: bool) -> float:
    """The mean error of clients with labels, or of those without, by these models."""
    method = as_flowdup(run.simulation.method)

    def error(client: ClientData, v: Tensor) -> float:
        found = method.f(method.subspace(v), client.x.to(v.device)).argmax(1).cpu()
        return float((found != client.labels)[client.labels >= 0].double().mean())

    everyone = zip(run.train, run.everyone or run.train, models, strict=True)
    return float(np.mean([error(known, v) for c, known, v in everyone if c.labeled == labeled]))
