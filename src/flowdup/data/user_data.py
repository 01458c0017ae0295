"""A user's own clients: a folder of .npz files, or a table with a column that names the client.

These readers bring data into the right form; whether it fits the federation (shape, finite values,
range of labels) is for `InputSpec.check` to say.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdup.data.clients import ClientData
from flowdup.data.numpy_files import read_arrays
from flowdup.data.traits import Trait
from flowdup.errors import ConfigError, DataError, shorten
from flowdup.memory import check_memory
from flowdup.strict_json import get_text, read_object

Array = NDArray[Any]
Clients = dict[str, list[ClientData]]  # by group: train, validation and test, or just "all"

_NUMBERS = "biuf"  # numpy's kinds: bool, int, unsigned, float
_MAPPABLE = (np.uint8, np.float32, np.float64)


def read_folder(path: Path) -> Clients:
    """Clients from one .npz each: `x` [n, ...], perhaps `y` [n] (-1: no label); scalars are traits.

    Sub-folders `train`, `validation` and `test` are the groups; without `train`, the folder itself
    is one group, "all".  A client is named after its file.
    """
    clients = {group: _read_group(folder) for group, folder in _groups(path).items()}
    return _apart(clients, path)


def read_table(
    path: Path,
    client_column: str,
    label_column: str | None,
    input_columns: Sequence[str],
    shape: tuple[int, ...] | None = None,
) -> Clients:
    """Clients from a Parquet file, a folder of them, or a Hugging Face dataset (`save_to_disk`).

    Rows with the same value in `client_column` make up a client; clients come in the order in which
    they first appear.  `input_columns` names one column of (nested) lists, or columns of numbers;
    `shape` is that of one point if it is not to be taken from the lists.  A null label is -1.  Any
    other column of single values is a trait of the clients within which it does not vary.
    Sub-folders `train`, `validation` and `test` are the groups, as in `read_folder`.
    """
    clients: Clients = {}
    for group, folder in _groups(path).items():
        table = _Table(_read_arrow(folder), folder)
        clients[group] = table.clients(client_column, label_column, input_columns, shape)
    return _apart(clients, path)


def read_inputs(path: Path) -> Tensor:
    """Points without labels, [n, ...], from an .npz (its `x`, or its only array) or an .npy.

    An .npy of uint8, float32 or float64 is mapped as it is: it may be larger than memory, and the
    tensor must not be written to.
    """
    names, arrays = read_arrays(path, ("x",))
    if "x" not in arrays and len(names) != 1:
        raise DataError(f"{path} has {_names(names)} but no array x: store the inputs as x")
    x = arrays["x"] if "x" in arrays else next(iter(arrays.values()))
    if isinstance(x, np.memmap) and x.ndim > 1 and x.size and x.dtype in _MAPPABLE:
        with warnings.catch_warnings(action="ignore"):  # torch's, that the memory is read-only
            return torch.from_numpy(x)
    return _inputs(x, str(path))


def _groups(path: Path) -> dict[str, Path]:
    if not path.exists():
        raise DataError(f"there is no {path}: give the path of the clients' data")
    if not (path / "train").is_dir():
        return {"all": path}
    groups = ("train", "validation", "test")
    return {group: path / group for group in groups if (path / group).is_dir()}


def _apart(clients: Clients, path: Path) -> Clients:
    """The same clients, each known to stand in one group only."""
    group_of: dict[str, str] = {}
    for group, members in clients.items():
        for client in members:
            if (other := group_of.setdefault(client.name, group)) != group:
                raise DataError(
                    f"client '{client.name}' of {path} is in {other} and in {group}: keep it in "
                    "one of them, or rename one if they are two clients"
                )
    return clients


def _read_group(folder: Path) -> list[ClientData]:
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise DataError(f"{folder} has no .npz files: store one per client, with an array x")
    return [_read_client(file) for file in files]


def _read_client(file: Path) -> ClientData:
    names, arrays = read_arrays(file, ("x", "y"))
    if "x" not in arrays:
        raise DataError(f"{file} has {_names(names)} but no array x: store the inputs as x")
    x = _inputs(arrays.pop("x"), str(file))
    y = _labels(arrays.pop("y"), len(x), str(file)) if "y" in arrays else None
    scalars = {name: a for name, a in arrays.items() if a.ndim == 0 and a.dtype.kind in "biufU"}
    known = {name: a.item() for name, a in scalars.items() if a.dtype.kind != "f" or np.isfinite(a)}
    return ClientData(x, y, file.stem, known)


def _inputs(x: Array, where: str) -> Tensor:
    """uint8 stays as it is, other numbers become float32."""
    if x.dtype.kind not in _NUMBERS:
        raise DataError(f"{where} has inputs of type {x.dtype}: store them as numbers")
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise DataError(
            f"{where} has inputs of shape {x.shape}: store an array with one row per point, of at "
            "least one number"
        )
    if x.dtype != np.uint8:
        check_memory(4 * x.size, where, "split the client's points among several", DataError)
    with np.errstate(over="ignore"):  # becomes infinite, which InputSpec.check reports
        return torch.from_numpy(np.array(x, np.uint8 if x.dtype == np.uint8 else np.float32))


def _labels(y: Array, points: int, where: str) -> Tensor:
    if y.dtype.kind not in "biu" or y.shape != (points,):
        raise DataError(
            f"{where} has labels of type {y.dtype} and shape {y.shape}: store one whole number per "
            f"point ({points}), from 0 on, -1 for no label"
        )
    if y.size and y.dtype.kind == "u" and y.max() > np.iinfo(np.int64).max:
        raise DataError(f"{where} has the label {y.max()}: store whole numbers from 0 on")
    return torch.from_numpy(y.astype(np.int64))


def _names(names: Iterable[str]) -> str:
    return shorten(", ".join(names), 300) or "nothing"


def _read_arrow(path: Path) -> Any:
    """A pyarrow.Table with all rows of a file or folder, its buffers validated."""
    try:
        import pyarrow as pa  # noqa: PLC0415  (an optional dependency)
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("tables need pyarrow: run pip install 'flowdup[data]'") from error

    def read(file: Path) -> Any:
        if file.suffix == ".arrow":
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                return stream.read_all()
        with ParquetFile(file) as parquet:
            _check_parquet(parquet.metadata, file)
            return parquet.read()

    try:
        files = _table_files(path)
        table = pa.concat_tables([read(file) for file in files])
        table.validate(full=True)  # a file's offsets are followed without a check from here on
        return table
    except (OSError, ValueError, KeyError, TypeError, MemoryError, pa.ArrowException) as error:
        why = shorten(error, 300)
        raise DataError(f"{path} is no readable table ({why}): write it again") from error


def _check_parquet(metadata: Any, file: Path) -> None:
    """Refuse more values than fit in memory, of which a few bytes may tell."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    size = sum(8 * max(c.num_values, 0) + max(c.total_uncompressed_size, 0) for c in columns)
    size = max(size, 8 * metadata.num_rows)
    check_memory(size, str(file), "write a table of fewer rows", DataError)


def _table_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    state = path / "state.json"  # of a Hugging Face dataset, whose folder may hold caches as well
    if state.is_file():
        names = [
            get_text(entry, "filename") for entry in read_object(state.read_bytes())["_data_files"]
        ]
        if wrong := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{state.name} names '{shorten(wrong[0])}', a file of another folder")
        return [path / name for name in names]
    files = sorted([*path.glob("*.parquet"), *path.glob("*.arrow")])
    if not files:
        raise DataError(f"{path} has no .parquet or .arrow files: give the folder that has them")
    return files


@dataclass(frozen=True)
class _Table:
    """A pyarrow.Table and where it comes from, which errors name."""

    table: Any
    path: Path

    def clients(
        self,
        client_column: str,
        label_column: str | None,
        input_columns: Sequence[str],
        shape: tuple[int, ...] | None,
    ) -> list[ClientData]:
        if not len(self.table):
            raise DataError(f"{self.path} has no rows: give a table with at least one")
        codes, names = self.codes(client_column)
        if codes.min() < 0:
            raise self.error(client_column, "has nulls", "give every row a client")
        x = self.inputs(input_columns, shape)
        y = None if label_column is None else self.labels(label_column)
        order = np.argsort(codes, kind="stable")  # client by client, each in the table's order
        starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
        traits: list[dict[str, Trait]] = [{} for _ in names]
        for column in self.table.column_names:
            if column not in (client_column, label_column, *input_columns):
                self.add_traits(traits, column, order, starts)
        rows = [torch.from_numpy(rows) for rows in np.split(order, starts[1:])]
        return [
            ClientData(x[rows[i]], None if y is None else y[rows[i]], str(name), traits[i])
            for i, name in enumerate(names)
        ]

    def inputs(self, names: Sequence[str], shape: tuple[int, ...] | None) -> Tensor:
        if not names:
            raise ConfigError("no input column is named: name one of lists, or some of numbers")
        columns = [self.dense(name) for name in names]
        if len(columns) > 1 and any(column.ndim > 1 for column in columns):
            raise self.error(names[0], "is one of several inputs", "give one column of lists only")
        x = columns[0] if columns[0].ndim > 1 else np.stack(columns, axis=1)
        if shape is not None and prod(shape) != prod(x.shape[1:]):
            has = f"has points of {prod(x.shape[1:])} values"
            raise self.error(names[0], has, f"set a shape of as many, not {shape}")
        return _inputs(x if shape is None else x.reshape(-1, *shape), str(self.path))

    def labels(self, name: str) -> Tensor:
        column = self.column(name)
        if column.null_count == len(column):
            return torch.full((len(column),), -1)
        if _kind(column.type) not in "biu":
            raise self.error(
                name, f"has labels of type {column.type}", "store whole numbers from 0 on"
            )
        if _kind(column.type) == "u" and (largest := _largest(column)) >= 2**63:
            raise self.error(name, f"has the label {largest}", "store whole numbers from 0 on")
        return torch.from_numpy(column.cast("int64", safe=False).fill_null(-1).to_numpy().copy())

    def add_traits(
        self, traits: list[dict[str, Trait]], name: str, order: Array, starts: Array
    ) -> None:
        kind = self.column(name).type
        if kind.num_fields or _kind(kind) == "M":  # lists, structs and times are no traits
            return
        codes, values = self.codes(name)
        low, high = (best.reduceat(codes[order], starts) for best in (np.minimum, np.maximum))
        for client in np.flatnonzero((low == high) & (low >= 0)):
            if isinstance(value := values[low[client]], Trait):
                traits[client][name] = value

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
        """A column of numbers as [n], one of (nested) lists as [n, ...]."""
        pieces = [self.dense_piece(name, piece) for piece in self.column(name).chunks if len(piece)]
        if len({piece.shape[1:] for piece in pieces}) > 1:
            raise self.error(name, "has lists of several lengths", "give every point one shape")
        return np.concatenate(pieces)

    def dense_piece(self, name: str, piece: Any) -> Array:
        shape = [len(piece)]
        while hasattr(piece.type, "value_type") and not piece.null_count:
            lengths = piece.value_lengths().unique().to_pylist()
            if len(lengths) > 1:
                raise self.error(name, "has lists of several lengths", "give every point one shape")
            shape.append(lengths[0] if lengths else 0)
            piece = piece.flatten()
        if piece.null_count:
            raise self.error(name, "has nulls", "fill them in or drop these rows")
        if _kind(piece.type) not in _NUMBERS:
            raise self.error(name, f"has inputs of type {piece.type}", "store them as numbers")
        return np.asarray(piece.to_numpy(zero_copy_only=False)).reshape(shape)

    def column(self, name: str) -> Any:
        if name not in self.table.column_names:
            there = _names(self.table.column_names)
            raise DataError(f"{self.path} has no column '{name}': choose among {there}")
        column = self.table.column(name)
        if hasattr(column.type, "storage_type"):  # an extension type, such as a fixed-shape tensor
            column = column.cast(column.type.storage_type)
        if hasattr(column.type, "index_type"):  # a dictionary, whose order need not be that of rows
            column = column.cast(column.type.value_type)
        return column

    def error(self, column: str, what: str, remedy: str) -> DataError:
        return DataError(f"column '{column}' of {self.path} {what}: {remedy}")


def _largest(column: Any) -> int:
    from pyarrow.compute import max as most  # noqa: PLC0415  (an optional dependency)

    return int(most(column).as_py())


def _kind(arrow_type: Any) -> str:
    """numpy's letter for a type: b, i, u, f, M for any time or date, O for what it lacks."""
    from pyarrow.types import is_temporal  # noqa: PLC0415  (an optional dependency)

    if is_temporal(arrow_type):  # numpy's own type may be asked of pandas
        return "M"
    try:
        return str(np.dtype(arrow_type.to_pandas_dtype()).kind)
    except NotImplementedError:
        return "O"
