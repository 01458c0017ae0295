"""What makes a federation, apart from what it learns: its description, and whether it fits."""

from dataclasses import dataclass, replace
from typing import Any

from flowdup.data.input_spec import InputSpec
from flowdup.errors import CheckpointError
from flowdup.methods import Method, MethodConfig
from flowdup.random import ZeroStream
from flowdup.strict_json import (
    get_count,
    get_counts,
    get_integer,
    get_numbers,
    get_object,
    get_text,
    get_texts,
)


@dataclass(frozen=True)
class FederationSpec:
    """A federation's description, as a checkpoint has it."""

    seed: int
    model: str
    method: dict[str, Any]  # as in the configuration
    inputs: InputSpec
    expansion_sha256: str  # the method's fingerprint
    shapes: dict[str, list[int]]  # of psi, of theta and of the method's state on the server

    @classmethod
    def of(
        cls, seed: int, model: str, table: dict[str, Any], inputs: InputSpec, method: Method
    ) -> "FederationSpec":
        """The description of a federation with this method."""
        return cls(seed, model, table, inputs, method.fingerprint, _shapes(method))

    @property
    def psi_names(self) -> list[str]:
        """In the order in which the method's `init` gives them, of a federation made here."""
        return [n.removeprefix("psi/") for n in self.shapes if n.startswith("psi/")]

    def is_same(self, stored: "FederationSpec") -> bool:
        """Whether a stored description is of this federation; it may lack names of classes and
        columns, and clients that are given in Python have no columns.
        """
        inputs = stored.inputs.with_names(self.inputs)
        if not self.inputs.columns:
            inputs = replace(inputs, columns=())
        return replace(stored, inputs=inputs) == self

    def check(self, method: Method) -> None:
        """Refuse a method that is made differently here."""
        if self.shapes != _shapes(method):
            raise CheckpointError(
                "the model is defined otherwise here than where this federation was trained: use "
                "the definition of that time"
            )
        if method.fingerprint != self.expansion_sha256:
            raise CheckpointError(
                "the seed gives another expansion here than where this federation was trained: use "
                "the same version of flowdup and of the model's definition"
            )


def read_federation(table: dict[str, Any]) -> FederationSpec:
    """The federation that a checkpoint's header describes; ValueError if it is none."""
    method = MethodConfig.from_table(get_object(table, "method"))  # with settings newer than it
    shapes = get_object(table, "shapes")
    counts = {name: list(get_counts(shapes, name)) for name in shapes}
    if not any(name.startswith("psi/") for name in shapes):
        raise ValueError("its shapes name no psi")
    return FederationSpec(
        get_integer(table, "seed"),
        get_text(table, "model"),
        method.table(),
        read_spec(get_object(table, "inputs")),
        get_text(table, "expansion_sha256"),
        counts,
    )


def read_spec(table: dict[str, Any]) -> InputSpec:
    """ValueError or DataError if it describes no inputs."""
    return InputSpec(
        get_counts(table, "shape"),
        get_text(table, "dtype"),
        get_count(table, "classes"),
        get_numbers(table, "mean"),
        get_numbers(table, "std"),
        get_texts(table, "class_names") if "class_names" in table else (),  # younger than the rest
        get_texts(table, "columns") if "columns" in table else (),  # and so are these
    )


def _shapes(method: Method) -> dict[str, list[int]]:
    groups = {"psi": method.init(ZeroStream(0)), "method": method.server_state()}
    own = {f"{g}/{n}": list(t.shape) for g, tensors in groups.items() for n, t in tensors.items()}
    return own | {f"theta/{n}": list(shape) for n, shape in method.f.shapes.items()}
