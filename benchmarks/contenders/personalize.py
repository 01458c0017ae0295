"""From one client's unlabeled images to its model, in steps; against one forward pass of h1."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from contenders.entry import Entry, Pace
from contenders.work import STREAM
from flowdup.accelerate.functions import fast_function
from flowdup.federation_spec import FederationSpec
from flowdup.params import strip_prefix
from flowdup.personalize import Federation


@torch.no_grad()
def run(entry: Entry, pace: Pace) -> None:
    work, device = entry.work, entry.device
    method: Any = work.build(device)
    psi, h1 = work.start(method, device), strip_prefix(work.start(method, device), "h1.")
    x = work.population()[0].x.to(device)
    present = torch.ones(len(x), device=device)
    spec = FederationSpec.of(STREAM.seed, work.model, work.table(), work.inputs, method)
    federation = Federation(spec, method, psi, 0)
    personalizer = cache(lambda: federation.personalizer(x))
    prepared_h1 = cache(lambda: fast_function(lambda x: method.h.h1(h1, x), x))
    actions: dict[str, Callable[[], object]] = {
        "h1": lambda: method.h.h1(h1, x),
        "h1-prepared": lambda: prepared_h1()(x),
        "weights": lambda: method.personalize(psi, x, present),
        "prediction": lambda: method.f(method.personalize(psi, x, present), x[:1]).argmax(1),
        "prepared": lambda: personalizer()(x),
        "prepared-prediction": lambda: method.f(personalizer()(x), x[:1]).argmax(1),
        "module": lambda: federation.personalize(x),
        "module-prediction": lambda: federation.personalize(x).predict(x[:1]),
    }
    action = actions[entry.variant]
    if action is actions["prepared"]:
        pair = federation.personalizer(x)(x), actions["weights"]()
        torch.testing.assert_close(*pair, rtol=1e-2, atol=1e-4)  # TF32
    pace.ready()
    for _ in range(entry.rounds):
        action()
        pace()
