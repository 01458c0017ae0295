"""What a method asks of one client: numbers learned, bytes sent, operations done."""

from dataclasses import dataclass

import torch

from flowdup.client import ClientConfig, client_update
from flowdup.data.clients import ClientData, InputSpec
from flowdup.engines.base import local_batches, on_device
from flowdup.methods import Method, Params
from flowdup.random import Stream

_FLOAT = 4  # bytes of a number on the wire


@dataclass(frozen=True)
class Cost:
    points: int  # of the client that is counted for
    parameters: int  # trained, by all clients together
    bytes_down: int  # per client and round
    bytes_up: int
    train_flops: int  # of one client in one round
    personalize_flops: int  # from unlabeled data to the weights of a client's own model
    predict_flops: int  # of that model, per input


def measure(
    method: Method, config: ClientConfig, inputs: InputSpec, psi: Params, points: int
) -> Cost:
    """Count for a client with so many labeled points, by doing its work once.

    Products of matrices and convolutions count, forward and backward, two operations per multiply
    and add; what is linear in the data or the weights does not.
    """
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415  (imports Triton)

    first = next(iter(psi.values()))
    x = torch.zeros(points, *inputs.shape, dtype=getattr(torch, inputs.dtype))
    client = ClientData(x, torch.zeros(points, dtype=torch.int64))
    batches = on_device(local_batches(client, config, Stream(0), 0), first.device, first.dtype)
    told = {n: method.memory()[n].to(first) for n in method.told}
    with FlopCounterMode(display=False) as training:
        client_update(method, config, psi, batches, told)
    x = x.to(first.device)
    with torch.no_grad(), FlopCounterMode(display=False) as personalizing:
        theta = method.personalize(psi, x, x.new_ones(points, dtype=first.dtype))
    with torch.no_grad(), FlopCounterMode(display=False) as predicting:
        method.f(theta, x[:1])
    parameters = sum(p.numel() for p in psi.values())
    return Cost(
        points,
        parameters,
        _FLOAT * (parameters + sum(t.numel() for t in told.values())),
        _FLOAT * parameters,
        training.get_total_flops(),
        personalizing.get_total_flops(),
        predicting.get_total_flops(),
    )
