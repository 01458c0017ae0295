"""From unlabeled data to a classifier: one forward pass, no label, no gradient."""

import copy
import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from flowdup.checkpoint import FederationSpec, load_checkpoint, read_spec
from flowdup.config import read_method
from flowdup.data.clients import ClientData, InputSpec
from flowdup.errors import CheckpointError, FlowdupError
from flowdup.files import write_atomic
from flowdup.methods import Method, Params, Parts
from flowdup.models import Weights, build_network
from flowdup.random import Stream

Inputs = Tensor | NDArray  # type: ignore[type-arg]


class PersonalModel(nn.Module):
    """One client's own classifier, an ordinary module from inputs as stored to logits."""

    def __init__(self, model: str, inputs: InputSpec, weights: Weights) -> None:
        super().__init__()
        self.name, self.inputs = model, inputs
        read = inputs.reader("cpu", torch.float32)
        network = build_network(model, inputs.shape, inputs.classes, read)
        self.module = copy.deepcopy(network.module)
        self.read = read
        self.module.load_state_dict({n: w.to("cpu", torch.float32) for n, w in weights.items()})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(self.read(x))
        return out

    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """The class of each input; DataError if the inputs do not fit."""
        logits: Tensor = self(_checked(self.inputs, x))
        return logits.argmax(1)

    def save(self, path: Path) -> None:
        """One safetensors file that says what it is; `load_model` opens it."""
        weights = dict(self.module.state_dict())
        about = json.dumps({"model": self.name, "inputs": asdict(self.inputs)}, sort_keys=True)
        metadata = {"flowdup": about, "sha256": _digest(about, weights)}
        write_atomic(path, save_tensors(weights, metadata))


def load_model(path: Path) -> PersonalModel:
    try:
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the model {path} ({error}): personalize again"
        ) from None
    about = metadata.get("flowdup", "")
    if metadata.get("sha256") != _digest(about, weights):
        raise CheckpointError(
            f"the model {path} was changed or is not flowdup's: personalize again"
        )
    told = json.loads(about)
    return PersonalModel(told["model"], read_spec(told["inputs"]), weights)


class Federation:
    """What training leaves behind: psi, and all it takes to make any client's model."""

    def __init__(self, federation: FederationSpec, method: Method, psi: Params, round: int) -> None:
        self.federation, self.method, self.psi, self.round = federation, method, psi, round

    @torch.no_grad()
    def personalize(self, x: Inputs) -> PersonalModel:
        """The client's own model from its unlabeled inputs x [n, *shape], n at least 1."""
        x = _checked(self.federation.inputs, x)
        weights = self.method.personalize(self.psi, x, torch.ones(x.shape[0]))
        return PersonalModel(self.federation.model, self.federation.inputs, weights)

    @torch.no_grad()
    def embedding(self, x: Inputs) -> Tensor:
        """r(X), what the hypernetwork knows of the client."""  # [embedding]
        embed = getattr(self.method, "embedding", None)
        if embed is None:
            name = self.federation.method["name"]
            raise FlowdupError(f"method '{name}' has no embedding of clients: train flowdup")
        x = _checked(self.federation.inputs, x)
        r: Tensor = embed(self.psi, x, torch.ones(x.shape[0]))
        return r


def load(folder: str | Path) -> Federation:
    """Open a run folder (or the checkpoint folder inside it) and check all that can be checked."""
    folder = Path(folder)
    inside = folder / "checkpoint"
    federation, state = load_checkpoint(inside if inside.is_dir() else folder)
    parts = Parts(federation.model, federation.inputs, Stream(federation.seed))
    method = read_method(federation.method).build(parts)
    check_expansion(method, federation)
    psi = {n: p.float() for n, p in state.psi.items()}
    return Federation(federation, method, psi, state.round)


def check_expansion(method: Method, federation: FederationSpec) -> None:
    """Refuse a method whose theta_0 or P came out differently here."""
    if method.fingerprint != federation.expansion_sha256:
        raise CheckpointError(
            "the seed gives another expansion here than where this federation was trained: use the "
            "same version of flowdup and of the model's definition"
        )


def _checked(inputs: InputSpec, x: Inputs) -> Tensor:
    tensor = x if isinstance(x, Tensor) else torch.from_numpy(x)
    return inputs.check(ClientData(tensor)).x


def _digest(about: str, weights: Weights) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].numpy().tobytes())
    return digest.hexdigest()
