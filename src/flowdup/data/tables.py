"""Clients of a table that has a row per point and a column that names the client."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdup.data.arrow_files import has_csv
from flowdup.data.class_names import read_float_labels
from flowdup.data.client_groups import Unnamed
from flowdup.data.clients import ClientData
from flowdup.data.image_files import Image, ImageReader
from flowdup.data.tensors import as_inputs, listed
from flowdup.data.traits import Trait
from flowdup.errors import ConfigError, DataError, shorten
from flowdup.strict_json import read_lenient_json

Array = NDArray[Any]

_NUMBERS = "biuf"  # numpy's kinds: bool, int, unsigned, float


@dataclass(frozen=True)
class ClientTable:
    """A pyarrow.Table and where it comes from, which errors name."""

    table: Any
    path: Path
    images: ImageReader
    client: str = ""  # of whom alone it has rows

    def clients(
        self,
        client_column: str,
        label_column: str | None,
        input_columns: Sequence[str],
        shape: tuple[int, ...] | None,
        guessed: bool = False,
    ) -> list[Unnamed]:
        """`guessed`: the inputs were not named by a person, who must say what text is for."""
        self.check_rows()
        codes, names = self.codes(client_column)
        if codes.min() < 0 or "" in names:
            raise self.error(client_column, "is empty in some rows", "give every row a client")
        columns, found_here = self.input_names(input_columns, (client_column, label_column))
        guessed = guessed or found_here
        x = self.inputs(columns, shape)
        y = None if label_column is None else self.labels(label_column)
        order = np.argsort(codes, kind="stable")  # client by client, each in the table's order
        starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
        traits: list[dict[str, Trait]] = [{} for _ in names]
        for column in self.table.column_names:
            if column.strip() and column not in (client_column, label_column, *columns):
                varies = self.add_traits(traits, column, order, starts)
                if varies and guessed:
                    raise self.error(
                        column,
                        "is neither a number nor the same for all points of a client",
                        "name the columns to be read in data.input_columns, or drop it",
                    )
        found = []
        for i, rows in enumerate(np.split(order, starts[1:])):
            own = y[rows] if isinstance(y, Tensor) else None
            texts = [y[row] for row in rows] if isinstance(y, list) else None
            client = ClientData(x[torch.from_numpy(rows)], own, str(names[i]), traits[i])
            found.append(Unnamed(client, texts))
        return found

    def input_names(
        self, given: Sequence[str], others: Sequence[str | None]
    ) -> tuple[Sequence[str], bool]:
        """The inputs' columns, and whether they are a guess: for x, the default, where it is one of
        numbers, or where a CSV has none, all named columns of numbers but others.
        """
        names = self.table.column_names
        one = _may_be_numbers(self.column("x").type) if "x" in names else has_csv(self.path)
        if tuple(given) != ("x",) or not one:
            return given, False
        return self.number_columns(others), True

    def number_columns(self, others: Sequence[str | None]) -> list[str]:
        """All columns of numbers but others, and those without a name, as pandas writes a table's
        index; DataError if there are none.
        """
        names = [name for name in self.table.column_names if name.strip()]
        found = [n for n in names if n not in others and _may_be_numbers(self.column(n).type)]
        if not found:
            raise DataError(
                f"{self.path} has no columns of numbers but {listed(filter(None, others))}: write "
                "the inputs as numbers, with names in the first line"
            )
        return found

    def is_image(self, name: str) -> bool:
        """Whether a column has images."""
        return _is_image(self.column(name).type)

    def is_wide(self, name: str) -> bool:
        """Whether a column has images or (nested) lists of numbers."""
        own = self.column(name).type
        inner = own
        while hasattr(inner, "value_type"):
            inner = inner.value_type
        return _is_image(own) or (inner is not own and _kind(inner) in _NUMBERS)

    def number_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """The inputs' columns if these hold single numbers; none for a column of lists or images,
        whose numbers have no names.
        """
        single = all(_may_be_numbers(self.column(name).type) for name in names)
        return tuple(names) if single else ()

    def check_rows(self) -> None:
        """Refuse an empty table."""
        if not len(self.table):
            raise DataError(f"{self.path} has no rows: give a table with at least one")

    def inputs(self, names: Sequence[str], shape: tuple[int, ...] | None) -> Tensor:
        """Inputs [rows, *shape] from one column of lists or images, or several of numbers."""
        self.check_rows()
        if not names:
            raise ConfigError("no input column is named: name one of lists, or some of numbers")
        columns = [self.dense(name) for name in names]
        if len(columns) > 1 and any(column.ndim > 1 for column in columns):
            raise self.error(names[0], "is one of several inputs", "give one column of lists only")
        x = columns[0] if columns[0].ndim > 1 else np.stack(columns, axis=1)
        if shape is not None and prod(shape) != prod(x.shape[1:]):
            has = f"has points of {prod(x.shape[1:])} values"
            raise self.error(names[0], has, f"set a shape of as many, not {shape}")
        return as_inputs(x if shape is None else x.reshape(-1, *shape), str(self.path))

    def labels(self, name: str) -> Tensor | list[str]:
        """Numbers, -1 where there is none, or texts."""
        column = self.column(name)
        if column.null_count == len(column):
            return torch.full((len(column),), -1)
        if _kind(column.type) == "f":
            return read_float_labels(column.to_numpy(), f"column '{shorten(name)}' of {self.path}")
        if _is_text(column.type):
            return [text or "" for text in column.to_pylist()]
        if _kind(column.type) not in "biu":
            raise self.error(
                name, f"has labels of type {column.type}", "store whole numbers from 0 on"
            )
        if _kind(column.type) == "u" and (largest := _largest(column)) >= 2**63:
            raise self.error(name, f"has the label {largest}", "store whole numbers from 0 on")
        return torch.from_numpy(column.cast("int64", safe=False).fill_null(-1).to_numpy().copy())

    def class_names(self, label_column: str | None) -> tuple[str, ...]:
        """Those that a Hugging Face dataset has for a column of its type ClassLabel."""
        try:
            about = read_lenient_json((self.table.schema.metadata or {})[b"huggingface"])
            names = about["info"]["features"][label_column]["names"]
        except (ValueError, LookupError, TypeError):  # most tables say nothing of the kind
            return ()
        named = isinstance(names, list) and all(isinstance(name, str) for name in names)
        return tuple(names) if named else ()

    def add_traits(
        self, traits: list[dict[str, Trait]], name: str, order: Array, starts: Array
    ) -> bool:
        """Whether it varies within a client, which then has no such trait."""
        kind = self.column(name).type
        if kind.num_fields or _kind(kind) == "M":  # lists, structs and times are no traits
            return True
        codes, values = self.codes(name)
        low, high = (best.reduceat(codes[order], starts) for best in (np.minimum, np.maximum))
        for client in np.flatnonzero((low == high) & (low >= 0)):
            if isinstance(value := values[low[client]], Trait):
                traits[client][name] = value
        return bool((low != high).any())

    def codes(self, name: str) -> tuple[Array, list[Any]]:
        """Per row the place of its value (-1: null) among the values, these by first appearance."""
        column = self.column(name)
        if column.type.num_fields:
            raise self.error(name, f"has values of type {column.type}", "give a column of names")
        if _kind(column.type) == "M":  # as Python objects, some of these ask for pandas
            column = column.cast("string")
        encoded = column.dictionary_encode().combine_chunks()
        return encoded.indices.fill_null(-1).to_numpy(), encoded.dictionary.to_pylist()

    def dense(self, name: str) -> Array:
        """A column of numbers as [n], one of (nested) lists or of images as [n, ...]."""
        column = self.column(name)
        if _is_image(column.type):
            images = (self.image(name, row, value.as_py()) for row, value in enumerate(column))
            return self.images.read(images, len(column)).numpy()
        pieces = [self.dense_piece(name, piece) for piece in column.chunks if len(piece)]
        if len({piece.shape[1:] for piece in pieces}) > 1:
            raise self.error(name, "has lists of several lengths", "give every point one shape")
        return np.concatenate(pieces)

    def image(self, name: str, row: int, value: Any) -> Image:
        """Of Hugging Face's type Image, or just its bytes: a file's content, or else its path."""
        where = f"row {row} of column '{name}' of {self.path}"
        content = value if isinstance(value, bytes | None) else value.get("bytes")
        if isinstance(content, bytes):
            return where, BytesIO(content)
        path = None if value is None else value.get("path")
        if not isinstance(path, str):
            raise self.error(name, f"has no image in row {row}", "fill it in or drop this row")
        return f"{path}, {where},", self.path.parent / path

    def dense_piece(self, name: str, piece: Any) -> Array:
        """A piece of a column as an array [rows, ...]; no gaps, no lists of several lengths."""
        shape = [len(piece)]
        while hasattr(piece.type, "value_type") and not piece.null_count:
            lengths = piece.value_lengths().unique().to_pylist()
            if len(lengths) > 1:
                raise self.error(name, "has lists of several lengths", "give every point one shape")
            shape.append(lengths[0] if lengths else 0)
            piece = piece.flatten()
        if piece.null_count:
            first = self.column(name).is_null().index(True).as_py()  # -1: inside of lists
            where = f", the first in row {first} (counted from 0)" if first >= 0 else " in lists"
            raise self.error(name, f"has nulls{where}", "fill them in or drop these rows")
        if _kind(piece.type) not in _NUMBERS:
            raise self.error(name, f"has inputs of type {piece.type}", "store them as numbers")
        return np.asarray(piece.to_numpy(zero_copy_only=False)).reshape(shape)

    def column(self, name: str) -> Any:
        """A column by name, as plain values; DataError names those that there are."""
        if name not in self.table.column_names:
            there = listed(self.table.column_names)
            raise DataError(
                f"{self.path} has no column '{shorten(name)}': name those to be read (--set) "
                f"by data.client_column, data.label_column and data.input_columns, among {there}"
            )
        column = self.table.column(name)
        if hasattr(column.type, "storage_type"):  # an extension type, such as a fixed-shape tensor
            column = column.cast(column.type.storage_type)
        if hasattr(column.type, "index_type"):  # a dictionary, whose order need not be that of rows
            column = column.cast(column.type.value_type)
        return column

    def error(self, column: str, what: str, remedy: str) -> DataError:
        """The error that something is wrong with a column."""
        whose = f", rows of client '{shorten(self.client)}'," if self.client else ""
        return DataError(f"column '{shorten(column)}' of {self.path}{whose} {what}: {remedy}")


def _largest(column: Any) -> int:
    from pyarrow.compute import max as most  # noqa: PLC0415  (an optional dependency)

    return int(most(column).as_py())


def _is_text(arrow_type: Any) -> bool:
    from pyarrow.types import is_large_string, is_string  # noqa: PLC0415  (an optional dependency)

    return bool(is_string(arrow_type) or is_large_string(arrow_type))


def _may_be_numbers(arrow_type: Any) -> bool:
    """A column without a value may, too: that it has none is then said of it."""
    from pyarrow.types import is_null  # noqa: PLC0415  (an optional dependency)

    return _kind(arrow_type) in _NUMBERS or bool(is_null(arrow_type))


def _is_image(arrow_type: Any) -> bool:
    """Whether it is Hugging Face's type Image, or bytes, which can only be encoded images."""
    from pyarrow import types  # noqa: PLC0415  (an optional dependency)

    if types.is_struct(arrow_type):
        return bool(arrow_type.get_field_index("bytes") >= 0)
    return bool(types.is_binary(arrow_type) or types.is_large_binary(arrow_type))


def _kind(arrow_type: Any) -> str:
    """numpy's letter for a type: b, i, u, f, M for any time or date, O for what it lacks."""
    from pyarrow.types import is_temporal  # noqa: PLC0415  (an optional dependency)

    if is_temporal(arrow_type):  # numpy's own type may be asked of pandas
        return "M"
    try:
        return str(np.dtype(arrow_type.to_pandas_dtype()).kind)
    except NotImplementedError:
        return "O"
