# mypy: allow-untyped-calls, disable-error-code="type-arg, assignment, misc, dict-item"
"""What a convolution costs when each of 100 clients has weights of its own: our kernels, what
`vmap` makes of torch's (a grouped convolution), and im2col with a batched product.

`PYTHONPATH=src python benchmarks/convolution.py` on a GPU; needs torch and Triton, nothing else.
`--tiny` runs anywhere, `--layers cnn` takes some layers, `--search` tries other blocks as well.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, fold, unfold

if importlib.util.find_spec("safetensors") is None:  # the package imports it, these parts do not
    package = ModuleType("flowdup")
    package.__path__ = [str(Path(__file__).parents[1] / "src" / "flowdup")]
    sys.modules["flowdup"] = package

from flowdup.accelerate.convolution import Conv, Geometry, InputGradient, WeightGradient
from flowdup.accelerate.dispatch import kernels_for
from flowdup.provenance import provenance

KINDS = ("forward", "input gradient", "weight gradient")
CALLS = 10  # between two looks at the clock


@dataclass(frozen=True)
class Layer:
    c: int
    o: int
    side: int
    kernel: int
    stride: int = 1
    padding: int = 0

    @property
    def out(self) -> int:
        return (self.side + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def how(self) -> Geometry:
        square = ((n, n) for n in (self.side, self.kernel, self.stride, self.padding))
        return Geometry(*square)


LAYERS = {
    "cnn-cifar-1": Layer(3, 32, 32, 5),
    "cnn-cifar-2": Layer(32, 64, 14, 5),
    "cnn-femnist-1": Layer(1, 32, 28, 5),
    "cnn-femnist-2": Layer(32, 64, 12, 5),
    "cnn-mcmahan-2": Layer(32, 64, 14, 5, 1, 2),
    "resnet18-stem": Layer(3, 64, 32, 3, 1, 1),
    "resnet18-64": Layer(64, 64, 32, 3, 1, 1),
    "resnet18-64-128": Layer(64, 128, 32, 3, 2, 1),
    "resnet18-64-128-short": Layer(64, 128, 32, 1, 2),
    "resnet18-128": Layer(128, 128, 16, 3, 1, 1),
    "resnet18-256": Layer(256, 256, 8, 3, 1, 1),
    "resnet18-512": Layer(512, 512, 4, 3, 1, 1),
}

BLOCKS = [  # m, k, warps, stages
    (64, 32, 4, 3),
    (64, 32, 2, 3),
    (64, 64, 4, 3),
    (128, 16, 4, 4),
    (128, 32, 4, 2),
    (128, 32, 4, 3),
    (128, 32, 4, 5),
    (128, 32, 8, 3),
    (128, 64, 4, 3),
    (128, 64, 8, 3),
    (256, 32, 8, 3),
]


@dataclass(frozen=True)
class Problem:
    layer: Layer
    x: Tensor  # [clients, n, c, h, w], channels last
    w: Tensor  # [clients, o, c, kh, kw]
    gy: Tensor  # [clients, n, o, oh, ow], channels last

    def to(self, dtype: torch.dtype) -> "Problem":
        return Problem(self.layer, *(t.to(dtype) for t in (self.x, self.w, self.gy)))

    def first(self, clients: int) -> "Problem":
        return Problem(self.layer, *(t[:clients] for t in (self.x, self.w, self.gy)))


def problem(layer: Layer, clients: int, images: int, device: torch.device) -> Problem:
    draw = torch.Generator(device).manual_seed(0)

    def images_of(channels: int, side: int) -> Tensor:
        shape = (clients, images, side, side, channels)
        return torch.randn(shape, generator=draw, device=device).permute(0, 1, 4, 2, 3)

    shape = (clients, layer.o, layer.c, layer.kernel, layer.kernel)
    w = torch.randn(shape, generator=draw, device=device) / (layer.c * layer.kernel**2) ** 0.5
    return Problem(layer, images_of(layer.c, layer.side), w, images_of(layer.o, layer.out))


def ours(kind: str, p: Problem) -> Tensor:
    if kind == "forward":
        return Conv.forward(p.x, p.w, None, p.layer.how)
    if kind == "input gradient":
        return InputGradient.forward(p.gy, p.w, p.layer.how)
    return WeightGradient.forward(p.gy, p.x, p.layer.how)


def grouped(kind: str, p: Problem) -> Tensor:
    """What `vmap` lowers torch's convolution to."""
    groups, how = p.x.shape[0], p.layer.how
    x, gy = (t.movedim(0, 1).flatten(1, 2) for t in (p.x, p.gy))
    w = p.w.flatten(0, 1)
    if kind == "forward":
        y = conv2d(x, w, None, how.stride, how.padding, groups=groups)
        return y.unflatten(1, (groups, -1)).movedim(1, 0)
    mask = (kind == "input gradient", kind == "weight gradient", False)
    gx, gw, _ = torch.ops.aten.convolution_backward(
        gy, x, w, None, how.stride, how.padding, (1, 1), False, (0, 0), groups, mask
    )
    if kind == "input gradient":
        return gx.unflatten(1, (groups, -1)).movedim(1, 0)
    return gw.unflatten(0, (groups, -1))


def im2col(kind: str, p: Problem) -> Tensor:
    """Columns [clients, n, c kh kw, oh ow] in memory, then products of matrices."""
    how, (clients, n) = p.layer.how, p.x.shape[:2]
    w = p.w.flatten(2)[:, None]  # [clients, 1, o, c kh kw]
    if kind == "input gradient":
        columns = (w.mT @ p.gy.flatten(3)).flatten(0, 1)
        gx = fold(columns, how.image, how.kernel, padding=how.padding, stride=how.stride)
        return gx.unflatten(0, (clients, n))
    columns = unfold(p.x.flatten(0, 1), how.kernel, padding=how.padding, stride=how.stride)
    columns = columns.unflatten(0, (clients, n))
    if kind == "forward":
        return (w @ columns).unflatten(3, p.gy.shape[3:])
    return (p.gy.flatten(3) @ columns.mT).sum(1).view(p.w.shape)


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Per call, the median of five; on a GPU replayed from a graph, so without Python's time."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(5):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) / 1e3 / CALLS)
    return statistics.median(times)


def error(found: Tensor, exact: Tensor) -> float:
    """The largest difference, against the largest value, for the clients that `exact` has."""
    return float((found[: len(exact)].double() - exact).abs().max() / exact.abs().max())


def measure(name: str, p: Problem, contenders: dict[str, Callable[..., Tensor]]) -> list[dict]:
    device, layer = p.x.device, p.layer
    flops = 2 * p.gy.numel() * layer.c * layer.kernel**2
    rows = []
    for kind in KINDS:
        exact = grouped(kind, p.first(2).to(torch.float64))
        for who, function in contenders.items():
            for dtype in (torch.float32, torch.bfloat16):
                if dtype == torch.bfloat16 and device.type == "cpu":
                    continue
                row = {"layer": name, "kind": kind, "who": who, "dtype": str(dtype)[6:]}
                try:
                    cast = p.to(dtype)
                    start = time.perf_counter()
                    row["error"] = float(f"{error(function(kind, cast), exact):.2g}")
                    row["first_s"] = round(time.perf_counter() - start, 3)
                    took = seconds(lambda f=function, q=cast, k=kind: f(k, q), device)
                    row |= {"ms": round(took * 1e3, 4), "tflops": round(flops / took / 1e12, 2)}
                except (RuntimeError, NotImplementedError) as failure:  # memory, or no such kernel
                    row["failed"] = str(failure).splitlines()[0]
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def search(name: str, p: Problem) -> list[dict]:
    """Our kernels with blocks [m, n, k, warps, stages] other than the table's, fastest first."""
    how, rows = p.layer.how, []
    for dtype in (torch.float32, torch.bfloat16):
        q = p.to(dtype)
        kernels = kernels_for(q.x)
        if kernels is None:
            continue
        calls = {
            "forward": lambda t, q=q, k=kernels: k.conv(q.x, q.w, None, how.stride, how.padding, t),
            "input gradient": lambda t, q=q, k=kernels: k.input_gradient(
                q.gy, q.w, how.image, how.stride, how.padding, t
            ),
            "weight gradient": lambda t, q=q, k=kernels: k.weight_gradient(
                q.gy, q.x, how.kernel, how.stride, how.padding, t
            ),
        }
        for kind, call in calls.items():
            written = p.layer.c if kind == "input gradient" else p.layer.o
            n = min(128, max(16, 1 << (written - 1).bit_length()))
            tried = []
            for m, k, warps, stages in BLOCKS:
                tile = kernels.Tile(m, n, k, warps, stages)
                try:
                    took = seconds(lambda c=call, t=tile: c(t), q.x.device)
                except Exception as failure:  # Triton's own kinds: too much shared memory, say
                    print(tile, repr(failure)[:100], file=sys.stderr)
                    continue
                tried.append((round(took * 1e3, 4), tuple(tile)))
            best = [{"ms": ms, "tile": tile} for ms, tile in sorted(tried)[:4]]
            rows.append({"layer": name, "kind": kind, "dtype": str(dtype)[6:], "best": best})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--images", type=int, default=25, help="per client")
    parser.add_argument("--layers", default="", help="only those whose name starts so")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    told = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")  # TF32 for im2col's products, as for convolutions
    clients, images = (2, 2) if told.tiny else (told.clients, told.images)
    contenders = {"ours": ours, "vmap": grouped, "im2col": im2col}
    rows, found = [], []
    for name, layer in LAYERS.items():
        if name.startswith(told.layers):
            p = problem(layer, clients, images, device)
            rows += measure(name, p, contenders)
            found += search(name, p) if told.search else []
    about = {"clients": clients, "images": images, "kernels": bool(kernels_for(p.x))}
    print(json.dumps(about | {"rows": rows, "search": found, **provenance(device)}, indent=1))


if __name__ == "__main__":
    main()
