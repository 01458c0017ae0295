"""The GPU is there, computes, and results that are measured on it name it."""

import torch

from flowdup.provenance import provenance


def test_a_gpu_multiplies_whole_numbers_as_the_cpu_does(gpu: torch.device) -> None:
    x = torch.arange(64.0).reshape(8, 8)
    assert torch.equal((x.to(gpu) @ x.to(gpu)).cpu(), x @ x)


def test_provenance_names_the_gpu(gpu: torch.device) -> None:
    assert provenance(gpu)["device"] == torch.cuda.get_device_name(gpu)
