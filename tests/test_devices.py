"""Devices by name."""

import os
import subprocess
import sys

import pytest
import torch

import flowdup
from flowdup.devices import parse_device
from flowdup.engines import EngineConfig
from flowdup.errors import ConfigError


def test_a_device_is_one_that_exists_here() -> None:
    assert parse_device("cpu") == torch.device("cpu")
    assert parse_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for use in (parse_device, lambda name: flowdup.load("nowhere", name)):
        with pytest.raises(ConfigError, match="unknown device 'abacus': use auto, cpu, cuda"):
            use("abacus")
    with pytest.raises(ConfigError, match="unknown device 'abacus'"):
        EngineConfig(device="abacus").torch_device()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="use the device cpu"):
        parse_device("cuda")
    with pytest.raises(ConfigError, match="unknown device 'cuda:0'"):
        parse_device("cuda:0")


def test_every_process_of_torchrun_takes_a_gpu_of_its_own() -> None:
    """Told as torchrun tells it; the process is made to believe in GPUs, since a test has none."""
    code = (
        "import torch; torch.cuda.is_available = lambda: True\n"
        "from flowdup.devices import parse_device; print(parse_device('auto'))"
    )
    for told, device in ((dict(TORCHELASTIC_RUN_ID="x"), "cuda:3"), ({}, "cuda:0")):
        environment = os.environ | {"LOCAL_RANK": "3"} | told
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == device
