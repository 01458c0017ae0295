"""One client's own classifier: an ordinary module, and the file that it is saved in."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from numpy.typing import NDArray
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from flowdup.certificate.prediction_sets import SetThresholds
from flowdup.certificate.stored import read_thresholds
from flowdup.data.clients import ClientData
from flowdup.data.input_spec import InputSpec
from flowdup.data.table_inputs import DEFAULT_COLUMN
from flowdup.data.tensors import as_tensor
from flowdup.errors import (
    CertificateError,
    CheckpointError,
    ConfigError,
    DataError,
    FlowdupError,
)
from flowdup.federation_spec import read_spec
from flowdup.files import write_atomic
from flowdup.models import Weights, build_network, own_shapes
from flowdup.models.network import keeps_statistics
from flowdup.stored_tensors import FLOATS, StoredTensors, all_finite, load_tensors, open_tensors
from flowdup.strict_json import get_object, get_text, read_object

Inputs = Tensor | NDArray[Any]

_CHUNK = 2048  # inputs that are classified at once


class PersonalModel(nn.Module):
    """One client's own classifier, an ordinary module from inputs as stored to logits.

    It begins in eval mode, without gradients; after `requires_grad_()` any optimiser can fine-tune
    it.  Beware: in train mode dropout is on, also in `predict`.
    """

    def __init__(
        self,
        model: str,
        inputs: InputSpec,
        weights: Weights,
        sets: SetThresholds | None = None,
        is_global: bool = False,  # the one model for everyone, nobody's own
        client_column: str = DEFAULT_COLUMN,  # of tables, names whose rows they are
    ) -> None:
        super().__init__()
        self.name, self.inputs, self.read = model, inputs, inputs.reader()
        self.sets = sets  # what prediction sets need, if the federation is certified
        self.is_global = is_global
        self.client_column = client_column
        network = build_network(model, inputs.shape, inputs.classes, self.read)
        if network.shapes != {n: tuple(w.shape) for n, w in weights.items()}:
            raise CheckpointError(
                f"the weights do not fit the model '{model}' as it is defined here: use the "
                "definition that they were made with"
            )
        self.module = network.module
        self.to(next(iter(weights.values())).device)
        for name, parameter in self.module.named_parameters():
            parameter.copy_(weights[name])
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes] of inputs as stored [n, *shape]."""
        out: Tensor = self.module(self.read(x))
        return out

    def train(self, mode: bool = True) -> Self:
        """As for any module, but running statistics of batches stay as the model's definition has
        them: they are no weights, and `save` does not know them.
        """
        super().train(mode)
        for part in self.module.modules():
            if keeps_statistics(part):
                part.eval()
        return self

    def predict(self, x: Inputs) -> Tensor:
        """The class of each input, where the model is; DataError if the inputs do not fit."""
        return torch.cat([logits.argmax(1) for logits in self._logits(x)])

    def predict_proba(self, x: Inputs) -> Tensor:
        """The probability of each class for each input [n, classes], where the model is."""
        return torch.cat([logits.softmax(1) for logits in self._logits(x)])

    def predict_set(self, x: Inputs, coverage: float = 0.9) -> Tensor:
        """Which classes each input may have [n, classes] bool, where the model is: a new client's
        point has its class among them with this probability (`certificate/prediction_sets.py`).

        The threshold is the client's own, by how sure its model is of the points that it was made
        from (`certificate/own_thresholds.py`).  CertificateError if the federation has not been
        certified, or this is the global model.  Beware: a set may be empty, where no class is
        likely, and the weights must be those that were personalized.
        """
        if self.is_global:
            raise CertificateError(
                "this is the global model, and prediction sets are for personal models, whose "
                "thresholds are the client's own: personalize without `--foreign global`, or "
                "predict without sets"
            )
        if self.sets is None:
            raise CertificateError(
                "this model has no thresholds for prediction sets: run `flowdup certify` on the "
                "run folder, then personalize again"
            )
        found = 1 - self.exact_probabilities(x) <= self.sets.find(coverage)
        return found.to(next(self.parameters()).device)

    def exact_probabilities(self, x: Inputs) -> Tensor:
        """As `predict_proba`, in float64 and on the CPU: float32 has one value, 1, for all points
        that a model is very sure of, and thresholds of sets lie between them.
        """
        return self.logits(x).double().softmax(1)

    def predictions(self, x: Inputs) -> dict[str, list[Any]]:
        """For each input its class, the class's name and probability: lists of plain values."""
        classes: list[int] = []
        probabilities: list[float] = []
        for logits in self._logits(x):
            classes += logits.argmax(1).tolist()
            probabilities += logits.softmax(1).amax(1).tolist()
        names = [self.class_names[c] for c in classes]
        return {"classes": classes, "names": names, "probabilities": probabilities}

    def logits(self, x: Inputs) -> Tensor:
        """Of each input [n, classes], on the CPU; DataError if the inputs do not fit."""
        return torch.cat([logits.cpu() for logits in self._logits(x)])

    @torch.no_grad()
    def _logits(self, x: Inputs) -> Iterator[Tensor]:
        for chunk in torch.split(checked_inputs(self.inputs, x), _CHUNK):
            logits = self(chunk)
            if not bool(torch.isfinite(logits).all()):
                raise too_large("logits")
            yield logits

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of class 0, 1, ...; their numbers where the federation has no names."""
        return self.inputs.class_names or tuple(map(str, range(self.inputs.classes)))

    def save(self, path: str | Path) -> None:
        """One safetensors file that says what it is; `load_model` opens it."""
        weights = {n: p.detach().cpu().contiguous() for n, p in self.module.named_parameters()}
        if not all_finite(weights):
            raise FlowdupError(f"the model has NaN or infinite weights and is not saved to {path}")
        sets = {"sets": asdict(self.sets)} if self.sets else {}
        mark: dict[str, Any] = {"global": True} if self.is_global else {}
        if self.client_column != DEFAULT_COLUMN:
            mark["client_column"] = self.client_column
        described = {"model": self.name, "inputs": asdict(self.inputs)} | sets | mark
        about = json.dumps(described, sort_keys=True)
        metadata = {"flowdup": about, "sha256": weights_digest(about, weights)}
        write_atomic(Path(path), save_tensors(weights, metadata))


def load_model(path: str | Path) -> PersonalModel:
    """The model that `PersonalModel.save` wrote; CheckpointError if the file is anything else."""
    try:
        with open_tensors(Path(path)) as file:
            about = file.metadata.get("flowdup", "")
            described = read_object(about)
            name, inputs = get_text(described, "model"), read_spec(get_object(described, "inputs"))
            sets = read_thresholds(get_object(described, "sets")) if "sets" in described else None
            is_global = described.get("global") is True
            named = "client_column" in described  # younger than the rest
            column = get_text(described, "client_column") if named else DEFAULT_COLUMN
            _check_stored(file, name, inputs)
            weights = load_tensors(file.read())
        if file.metadata.get("sha256") != weights_digest(about, weights):
            raise ValueError("it was changed")
        if not all_finite(weights):
            raise ValueError("it holds NaN or infinite numbers")
    except (OSError, ValueError, ConfigError, DataError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"cannot read the model {path} ({why}): personalize again") from None
    return PersonalModel(name, inputs, weights, sets, is_global, column)


def _check_stored(file: StoredTensors, model: str, inputs: InputSpec) -> None:
    """Refuse weights other than those of the model, before one of them is read."""
    shapes = own_shapes(model, inputs.shape, inputs.classes)
    stored = {n: info.shape for n, info in file.tensors.items()}
    if (shapes and shapes != stored) or inputs.classes > file.numbers:
        raise ValueError(f"its weights do not fit the model '{model}' as it is defined here")
    if other := {info.dtype for info in file.tensors.values()} - FLOATS.keys():
        raise ValueError(f"its weights are of type {min(other)}")


def too_large(what: str) -> DataError:
    """The error that inputs give something that is not finite."""
    return DataError(
        f"these inputs give {what} with NaN or infinite numbers, so they are far from what the "
        "federation was trained on: check their scale"
    )


def checked_inputs(inputs: InputSpec, x: Inputs) -> Tensor:
    """Inputs as a tensor; DataError if a model for `inputs` cannot read them."""
    return inputs.check(ClientData(as_tensor(x, "inputs"))).x


def weights_digest(about: str, weights: Weights) -> str:
    """SHA-256 of named tensors on the CPU, and of a text before them."""
    digest = hashlib.sha256(about.encode())
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
