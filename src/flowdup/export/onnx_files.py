"""A module as an ONNX file: its batch may have any size, and it says what it is."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from flowdup.data.input_spec import InputSpec
from flowdup.errors import ConfigError

OPSET = 20  # that onnxruntime 1.17 and onnxruntime-web 1.17 know, and all later ones


def example_inputs(inputs: InputSpec) -> Tensor:
    """Two points of the right shape and type, for a trace."""
    return torch.zeros(2, *inputs.shape, dtype=getattr(torch, inputs.dtype))


def onnx_bytes(
    module: nn.Module,
    example: Sequence[Tensor],
    names: Sequence[str],
    outputs: Sequence[str],
    about: Mapping[str, str],
) -> bytes:
    """The file's content.  The first dimension of the first input is the batch; `about` becomes the
    file's metadata.

    Beware: one module for one client.  A model that is vmapped over clients exports without an
    error and is frozen to the example's number of them.
    """
    batch = torch.export.Dim("n", min=1)
    shapes: list[dict[int, object]] = [{0: batch}, *({} for _ in example[1:])]
    with _quiet():
        try:
            program = torch.onnx.export(
                module.eval(),
                tuple(example),
                input_names=list(names),
                output_names=list(outputs),
                dynamic_shapes=tuple(shapes),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
        except ImportError as error:
            raise ConfigError(
                f"ONNX files need the package {error.name}: pip install 'flowdup[onnx]'"
            ) from None
    assert program is not None
    proto = program.model_proto
    for key, value in about.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    content: bytes = proto.SerializeToString()
    return content


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter prints, logs and warns of its own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
