"""NumPy files that several threads read at a time."""

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from flowdup.data.numpy_files import read_arrays


class Litter:
    """A cycle whose end runs Python code, between any two instructions of any thread."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        for _ in range(50):
            pass


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads that take turns, and garbage that is collected, all the time."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(5)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)


def test_threads_read_at_the_same_time(restless: None, tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", x=np.zeros((2, 3)), y=np.zeros(2))

    def read(depth: int) -> int:
        if depth:
            return read(depth - 1)  # the interpreter's depth is what threads could mix up
        for _ in range(300):
            Litter()
            assert read_arrays(tmp_path / "one.npz", ("x", "y")).names == ("x", "y")
        return 300

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(read, range(0, 80, 10))) == 8 * 300
