"""What a method asks of one client: numbers learned, bytes sent, operations done."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from flowdup.batches import batch_plan, cap_batch_size, local_batches
from flowdup.client import ClientConfig, ClientUpdate
from flowdup.data.clients import ClientData
from flowdup.data.input_spec import InputSpec
from flowdup.messages import Task
from flowdup.methods import Batch, Method, Params
from flowdup.random import Stream

_PER_ROUND = ("bytes_down", "bytes_up", "train_flops")


@dataclass(frozen=True)
class Cost:
    """What a method costs a client: numbers, bytes and operations."""

    points: int  # of the client that is counted for
    parameters: int  # trained, by all clients together
    bytes_down: int  # per client and round, of several stages the mean over planned rounds
    bytes_up: int  # likewise
    train_flops: int  # likewise
    personalize_flops: int  # from unlabeled data to the weights of a client's own model
    predict_flops: int  # of that model, per input
    bytes_once: int = 0  # down, before its first round: what the last stage begins from, it alone


def mean_of_stages(costs: Sequence[Cost], rounds: Sequence[int]) -> Cost:
    """What the last of several stages costs, and per round the mean over all that are planned."""

    def mean(key: str) -> int:
        each = [getattr(cost, key) for cost in costs]
        return round(fmean(each, rounds))

    return replace(costs[-1], **{key: mean(key) for key in _PER_ROUND})


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
    size = cap_batch_size(config.batch_size, [client])
    plan = batch_plan(Stream(0), 0, points, config.epochs, size)
    batches = local_batches(client, plan, first.device, first.dtype)
    broadcast = {n: method.server_state()[n].to(first) for n in method.broadcast}
    task = Task(1, psi, broadcast, {0: 0})
    update = ClientUpdate.for_task(method, config, task, Batch(*(t[0] for t in batches)))
    x = x.to(first.device)
    with FlopCounterMode(display=False) as training:
        if method.relabels:
            y = torch.full((points,), -1, device=first.device)
            method.labels(task.start, x, y, x.new_ones(points, dtype=first.dtype))
        reply = update(task, batches)
    with torch.no_grad(), FlopCounterMode(display=False) as personalizing:
        theta = method.personalize(psi, x, x.new_ones(points, dtype=first.dtype))
    with torch.no_grad(), FlopCounterMode(display=False) as predicting:
        method.f(theta, x[:1])
    parameters = sum(p.numel() for p in psi.values())
    return Cost(
        points,
        parameters,
        task.bytes,
        replace(reply, delta=reply.whole_delta(), factors={}).bytes,
        training.get_total_flops(),
        personalizing.get_total_flops(),
        predicting.get_total_flops(),
    )
