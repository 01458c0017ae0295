"""Scalars on their way to the host."""

import torch

from flowdup.accelerate.host_scalars import HostScalars


def test_scalars_that_are_read_later_are_those_of_now() -> None:
    scalars = [torch.tensor(1.5), torch.tensor(2.0, dtype=torch.float64)]
    later = HostScalars(scalars)
    scalars[0].fill_(7)
    assert later.read() == [1.5, 2.0]
