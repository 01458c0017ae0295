"""A consumer of bundles: the manifest, ONNX Runtime and NumPy, and no model or method of flowdup.

Its random numbers are flowdup's own generator, which `tests/test_random.py` holds to known answers.
"""

import hashlib
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from flowdup.random import Stream

Array = NDArray[Any]


class Consumer:
    """What a browser does with a bundle."""

    def __init__(self, folder: Path) -> None:
        self.manifest = json.loads((folder / "manifest.json").read_bytes())
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)
        for name, digest in self.manifest["files"].items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
        self.h, self.f = (
            onnxruntime.InferenceSession(folder / f"{name}.onnx")
            for name in ("hypernetwork", "classifier")
        )
        expansion = self.manifest["expansion"]
        self.k, self.d, self.layers = expansion["k"], expansion["d"], self.manifest["layers"]
        stored = np.frombuffer((folder / "weights.bin").read_bytes(), "<f4")
        self.psi_r = stored[: self.k]
        by_seed = self.manifest["start"] == "seed"
        self.start = self.drawn() if by_seed else stored[self.k :]
        sizes = [math.prod(layer["shape"]) for layer in self.layers]
        self.ends = np.cumsum(sizes)
        scales = np.array([layer["scale"] for layer in self.layers], np.float32)
        self.scales = np.repeat(scales, sizes)
        self.tensors = {"hashed": self.hashed, "kronecker": self.kronecker}[expansion["kind"]]()
        found = b"".join(np.ascontiguousarray(t).tobytes() for t in self.tensors)
        assert hashlib.sha256(found).hexdigest() == expansion["sha256"]

    def stream(self, *names: str) -> Stream:
        return Stream(self.manifest["seed"]).child(*names)

    def drawn(self) -> Array:
        parts = []
        for layer in self.layers:
            size = math.prod(layer["shape"])
            if "constant" in layer:
                parts.append(np.full(size, layer["constant"], np.float32))
            else:
                draw = self.stream("theta_0", layer["name"]).uniform(size)
                parts.append(draw * np.float32(layer["bound"]))
        return np.concatenate(parts)

    def hashed(self) -> list[Array]:
        pi = self.stream("expansion", "coordinate").permutation(self.d)
        energy = np.bincount(pi % self.k, weights=self.scales.astype(float) ** 2)
        signs = self.stream("expansion", "sign").signs(self.d)
        return [(pi % self.k).astype(np.int32), signs, np.sqrt(energy).astype(np.float32)]

    def kronecker(self) -> list[Array]:
        (a, b), (m, n) = _grid(self.d, 8), _grid(self.k, 1)
        left = self.stream("expansion", "left").signs(a * m).reshape(a, m)
        return [left, self.stream("expansion", "right").signs(b * n).reshape(b, n)]

    def moved(self, v: Array) -> Array:
        if self.manifest["expansion"]["kind"] == "hashed":
            coordinate, sign, norm = self.tensors
            rows = (v / norm)[coordinate] * sign
        else:
            left, right = self.tensors
            grid = np.zeros(left.shape[1] * right.shape[1], np.float32)
            grid[: self.k] = v / math.sqrt(self.d)
            grid = grid.reshape(left.shape[1], right.shape[1])
            rows = (left @ grid @ right.T).reshape(-1)[: self.d]
        return (self.start + self.scales * rows).astype(np.float32)

    def logits(self, x: Array, theta: Array) -> Array:
        found: Array = self.f.run(None, {"x": x, "theta": theta.astype(np.float32)})[0]
        return found

    def global_model(self) -> Array:
        learned = self.manifest["method"] == "flowdup-plus" and self.manifest["start"] != "seed"
        return self.start if learned else self.moved(self.psi_r)

    def personalize(self, x: Array) -> Array:
        v, _ = self.h.run(None, {"x": x})
        theta, correction = self.moved(v), self.manifest["correction"]
        if not correction:
            return theta
        numbers = {n: np.float32(value) for n, value in correction["numbers"].items()}
        if "move" in numbers:
            for_all = self.global_model()
            theta = for_all + numbers["move"] * (theta - for_all)
        weight, bias = (self.place(correction["last_layer"][name]) for name in ("weight", "bias"))
        if "scale" in numbers:
            theta[weight] *= numbers["scale"]
            theta[bias] = numbers["scale"] * theta[bias] + numbers["bias"]
        logits, shift = self.logits(x, theta), np.float32(0)
        for _ in range(correction["steps"]):
            w = np.exp(logits + shift - (logits + shift).max(1, keepdims=True))
            mean = (w / w.sum(1, keepdims=True)).mean(0)
            q = np.maximum(mean - numbers.get("sparsity", 0), 1e-6)
            shift = numbers.get("strength", 1) * np.log(q / q.sum())
        if "profile" in numbers:
            rank = np.argsort(np.argsort(-mean, kind="stable"))
            usual = numbers["strength"] * np.log(np.maximum(numbers["profile"], 1e-6))[rank]
            shift = shift + numbers["typical"] * (usual - shift)
        theta[bias] += shift
        return theta

    def place(self, name: str) -> slice:
        number = [layer["name"] for layer in self.layers].index(name)
        return slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))


def _grid(size: int, multiple: int) -> tuple[int, int]:
    columns = -(-(math.isqrt(size - 1) + 1) // multiple) * multiple
    return -(-size // columns), columns
