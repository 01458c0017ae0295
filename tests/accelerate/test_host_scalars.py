"""Scalars on their way to the host."""

import torch

from flowdup.accelerate.host_scalars import HostScalars


def test_scalars_that_are_read_later_are_those_of_now() -> None:
    scalars = {"a": torch.tensor(1.5), "b": torch.tensor(2.0, dtype=torch.float64)}
    later = HostScalars(scalars)
    scalars["a"].fill_(7)
    assert later.read() == {"a": 1.5, "b": 2.0}
