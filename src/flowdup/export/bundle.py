"""A bundle: all that it takes to make a client's own model without Python, in a folder.

    hypernetwork.onnx   a set of inputs as stored [n, *shape] -> v [k] and r(X)
    classifier.onnx     inputs as stored [n, *shape] and theta [d] -> logits
    weights.bin         little-endian float32: psi_r [k], and theta [d] where it was learned
    manifest.json       shapes, seed, expansion, correction, familiarity, class names, a SHA-256 of
                        every file
    samples.*           where asked for: clients to begin with (`samples.py`)
    SHA256SUMS          of all of them, for `sha256sum --check`

theta = start + S P v: P, and start where it was not learned, follow from the seed (`random.py`,
`subspace.py`: the same bits in every language) and are not in the bundle; the manifest has their
SHA-256.  Where the federation corrects for class shares, the manifest has the numbers, and the
consumer runs EM (`prior.py`).  Where the run has stored how to tell foreign clients
(`familiarity.py`), `familiarity` has it, else null.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowdup.data.clients import ClientData
from flowdup.errors import ConfigError
from flowdup.export.onnx_files import example_inputs, onnx_bytes
from flowdup.export.samples import ABOUT, POINTS, sample_files
from flowdup.files import write_atomic
from flowdup.methods.corrected import PREFIX, Corrected
from flowdup.methods.flowdup import FLowDUP
from flowdup.models import Network
from flowdup.params import Params, strip_prefix
from flowdup.personalize import Federation
from flowdup.prior import STEPS
from flowdup.settings import plain
from flowdup.subspace import Subspace
from flowdup.version import __version__

FORMAT = 1
HYPERNETWORK, CLASSIFIER = "hypernetwork.onnx", "classifier.onnx"
WEIGHTS, MANIFEST, SUMS = "weights.bin", "manifest.json", "SHA256SUMS"


def export_bundle(
    federation: Federation, out: Path, samples: Sequence[ClientData] = ()
) -> dict[str, Any]:
    """Write the files into a folder, sample clients beside them; what the manifest says."""
    method = _method_of(federation)
    psi = {n: p.cpu() for n, p in federation.psi.items() if not n.startswith(PREFIX)}
    start = _start(federation, method, psi)
    x, about = example_inputs(federation.spec.inputs), {"flowdup": __version__}
    theta = torch.zeros(method.subspace.d)
    files = {
        HYPERNETWORK: onnx_bytes(_SetReader(method, psi), [x], ["x"], ["v", "r"], about),
        CLASSIFIER: onnx_bytes(
            _Classifier(method.f), [x, theta], ["x", "theta"], ["logits"], about
        ),
        WEIGHTS: _weights(method, psi, start),
        **sample_files([federation.spec.inputs.check(client) for client in samples]),
    }
    manifest = _manifest(federation, method, start) | {"files": _digests(files)}
    files[MANIFEST] = json.dumps(manifest, indent=2).encode()
    sums = "".join(f"{digest}  {name}\n" for name, digest in _digests(files).items())
    for name, content in (files | {SUMS: sums.encode()}).items():
        write_atomic(out / name, content)
    for name in {POINTS, ABOUT} - files.keys():  # of an earlier bundle
        (out / name).unlink(missing_ok=True)
    return manifest


class _SetReader(nn.Module):
    """h: a client's inputs to v, and r(X) beside it."""

    def __init__(self, method: FLowDUP, psi: Params) -> None:
        super().__init__()
        self.h = method.h
        self.names = [n for n in psi if n.startswith(("h1.", "h2."))]
        for number, name in enumerate(self.names):
            self.register_buffer(f"p{number}", psi[name])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        params = {n: getattr(self, f"p{i}") for i, n in enumerate(self.names)}
        features = self.h.h1(strip_prefix(params, "h1."), x)  # not in chunks: those have a size
        r = self.h.pool([(features, torch.ones_like(features[:, 0]))])
        return self.h.head(params, r), r


class _Classifier(nn.Module):
    """f with its weights as one vector."""

    def __init__(self, f: Network) -> None:
        super().__init__()
        self.f = f
        self.sizes = [torch.Size(shape).numel() for shape in f.shapes.values()]

    def forward(self, x: Tensor, theta: Tensor) -> Tensor:
        parts = zip(self.f.shapes.items(), torch.split(theta, self.sizes), strict=True)
        return self.f({name: part.reshape(shape) for (name, shape), part in parts}, x)


def _method_of(federation: Federation) -> FLowDUP:
    method = federation.method
    method = method.method if isinstance(method, Corrected) else method
    if not isinstance(method, FLowDUP):
        name = federation.spec.method["name"]
        raise ConfigError(
            f"method '{name}' has no hypernetwork to export: train flowdup or flowdup-plus, or "
            "export a client's own model by `flowdup personalize --format onnx`"
        )
    return method


def _weights(method: FLowDUP, psi: Params, start: Tensor | None) -> bytes:
    parts = [psi.get("psi_r", torch.zeros(method.subspace.k)), *([] if start is None else [start])]
    return torch.cat(parts).contiguous().numpy().astype("<f4").tobytes()


def _start(federation: Federation, method: FLowDUP, psi: Params) -> Tensor | None:
    """What v moves [d], where the seed does not give it: FLowDUP+'s theta, or a stage's start."""
    if theta := strip_prefix(psi, "theta."):
        return torch.cat([theta[name].flatten() for name in method.subspace.shapes])
    odd = any(bool((c != c.flatten()[0]).any()) for c in method.f.constants.values())
    return method.subspace.theta_0.cpu() if federation.start or odd else None


def _layers(method: FLowDUP) -> Iterator[dict[str, Any]]:
    """Of theta, in order: how each is drawn by the seed, and its row scale."""
    for name, shape in method.subspace.shapes.items():
        layer = {"name": name, "shape": list(shape), "scale": method.subspace.scale[name]}
        if name in method.f.constants:
            yield layer | {"constant": float(method.f.constants[name].flatten()[0])}
        else:
            yield layer | {"bound": method.f.bound(name)}


def _manifest(federation: Federation, method: FLowDUP, start: Tensor | None) -> dict[str, Any]:
    spec, subspace = federation.spec, method.subspace
    correction = None
    if isinstance(federation.method, Corrected):
        fitted = strip_prefix(federation.psi, PREFIX)
        last = {"weight": federation.method.weight, "bias": federation.method.bias}
        numbers = {n: t.tolist() for n, t in fitted.items()}
        correction = {"steps": STEPS, "last_layer": last, "numbers": numbers}
    return {
        "format": FORMAT,
        "flowdup": __version__,
        "method": spec.method["name"],
        "model": spec.model,
        "round": federation.round,
        "seed": spec.seed,
        "inputs": plain(spec.inputs),
        "embedding": method.h.config.width,
        "expansion": {
            "kind": spec.method["subspace"]["kind"],
            "k": subspace.k,
            "d": subspace.d,
            "sha256": expansion_digest(subspace),
        },
        "start": "seed" if start is None else WEIGHTS,
        "layers": list(_layers(method)),
        "correction": correction,
        "familiarity": federation.summary.table() if federation.summary else None,
    }


def _digests(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def expansion_digest(subspace: Subspace) -> str:
    """SHA-256 of P alone: its tensors' numbers one after the other, little-endian."""
    found = hashlib.sha256()
    for tensor in subspace.expansion.tensors():
        array = tensor.cpu().numpy()
        found.update(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).data)
    return found.hexdigest()
