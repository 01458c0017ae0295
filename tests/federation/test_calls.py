"""Calls to nodes: what is said of one that fails, is slow or is silent."""

import time
from typing import Any

import pytest

from flowdup.federation.calls import Calls, CallSettings


class Proxy:
    """A node as FLARE gives it, which does one thing when it is asked to train."""

    def __init__(self, train: Any, ping: Any) -> None:
        self.train, self.ping = train, ping

    def __call__(self, timeout: float) -> "Proxy":
        return self


def fail(*_: Any) -> str:
    raise ConnectionResetError


def sleep(*_: Any) -> str:
    time.sleep(30)
    return "late"


def here() -> str:
    return "here"


@pytest.mark.parametrize(
    ("train", "ping", "why"),
    [
        (fail, here, "the call failed (ConnectionResetError)"),
        (sleep, here, "'train': too slow (5 s)"),
        (sleep, fail, "'train': silent"),
    ],
)
def test_why_a_node_is_lost(train: Any, ping: Any, why: str) -> None:
    silence = 3.5 if ping is here else 1.0
    calls = Calls({"north": Proxy(train, ping)}, CallSettings(timeout=5, silence=silence))
    began = time.monotonic()
    assert calls.call("train", {"north": ()}) == {}
    assert calls.lost == {"north": why}
    assert time.monotonic() - began < (1 if train is fail else 7)
