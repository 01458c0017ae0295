"""A user's own clients: a folder with one file or folder per client, or a table of all of them.

These readers bring data into the right form; whether it fits the federation (shape, finite values,
range of labels) is for `InputSpec.check` to say.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdup.data.arrow_files import is_csv, read_arrow
from flowdup.data.class_names import read_float_labels
from flowdup.data.client_groups import Clients, Unnamed, find_groups, name_classes
from flowdup.data.clients import ClientData
from flowdup.data.csv_clients import read_csv_client, read_csv_clients
from flowdup.data.image_files import (
    ImageReader,
    client_images,
    find_image_clients,
    is_image,
    read_image_client,
    with_channels,
    with_equal_channels,
)
from flowdup.data.numpy_files import read_arrays
from flowdup.data.table_inputs import DEFAULT_COLUMN, is_table, read_table_inputs
from flowdup.data.tables import ClientTable
from flowdup.data.tar_shards import find_tar_clients, is_tar, read_tar_client, read_tar_images
from flowdup.data.tensors import as_inputs, listed
from flowdup.errors import DataError

Array = NDArray[Any]

_NPZ, _CSV, _TARS = ".npz files", "CSV files", "tar files"
_IMAGES = "folders of images"
_MAPPABLE = (np.uint8, np.float32, np.float64)


def read_folder(
    path: Path,
    client_column: str = "client",
    label_column: str | None = "label",
    input_columns: Sequence[str] = ("x",),
    shape: tuple[int, ...] | None = None,
) -> Clients:
    """Clients from a folder, each named after its file or its own folder:

    client.npz           `x` [n, ...], perhaps `y` [n] (-1, NaN: none) or texts; scalars are traits
    client.csv           columns of numbers, perhaps one of labels; columns as for `read_table`
    client/class/1.png   images; client/1.png has no label
    client.tar           images 1.png, perhaps with labels 1.cls (`tar_shards`); or client/1.tar

    Sub-folders `train`, `validation` and `test` are the groups; without `train`, the folder itself
    is one group, "all".  Labels that are texts and folders of classes name the classes, in the
    order of the alphabet over all clients.
    """
    groups = find_groups(path)
    kind = _find_kind(groups, path)
    images = ImageReader()
    found: dict[str, list[Unnamed]] = {}
    columns: tuple[str, ...] = ()
    if kind == _CSV:
        settings = (client_column, label_column, input_columns, shape)
        found, columns = read_csv_clients(groups, *settings)
    elif kind == _IMAGES:
        for group, folder in groups.items():
            found[group] = [read_image_client(own, images) for own in find_image_clients(folder)]
    elif kind == _TARS:
        for group, folder in groups.items():
            shards = find_tar_clients(folder)
            found[group] = [read_tar_client(name, own, images) for name, own in shards.items()]
    else:
        for group, folder in groups.items():
            found[group] = [_read_npz(file) for file in sorted(folder.glob("*.npz"))]
    if images.first:
        found = with_equal_channels(found)
    return name_classes(found, path, numbers=kind != _IMAGES, columns=columns)


def read_table(
    path: Path,
    client_column: str,
    label_column: str | None,
    input_columns: Sequence[str],
    shape: tuple[int, ...] | None = None,
) -> Clients:
    """Clients from a Parquet or CSV file, a folder of them, or a Hugging Face dataset
    (`save_to_disk`).

    Rows with the same value in `client_column` make up a client; clients come in the order in which
    they first appear.  `input_columns` names one column of (nested) lists or of images (Hugging
    Face's type Image, or encoded bytes), or columns of numbers; ("x",) means all columns of numbers
    where x is one of these, or a CSV has none.  `shape` is that of one point if it is not to
    be taken from the lists.  Labels are whole numbers or texts, which name the classes; a null
    label is -1.  Any other column of single values is a trait of the clients within which it does
    not vary.
    Sub-folders `train`, `validation` and `test` are the groups, as in `read_folder`; all are read
    by the columns of the first.
    """
    images, class_names = ImageReader(), set()
    found: dict[str, list[Unnamed]] = {}
    names, guessed = input_columns, False
    columns: tuple[str, ...] = ()
    for group, folder in find_groups(path).items():
        text = [name for name in (client_column, label_column) if name]
        table = ClientTable(read_arrow(folder, text), folder, images)
        if not found:
            names, guessed = table.input_names(input_columns, (client_column, label_column))
            columns = table.number_names(names)
        found[group] = table.clients(client_column, label_column, names, shape, guessed)
        class_names.add(table.class_names(label_column))
    if len(class_names) > 1:
        raise DataError(f"the groups of {path} name their classes otherwise: give all the same")
    if images.first:
        found = with_equal_channels(found)
    return name_classes(found, path, class_names.pop(), columns=columns)


def read_inputs(
    path: Path,
    shape: tuple[int, ...] = (),
    columns: Sequence[str] = (),
    client: str = "",
    client_column: str = DEFAULT_COLUMN,
) -> Tensor:
    """Points without labels, [n, ...], from an .npz (its `x`, or its only array), an .npy, a table
    (`table_inputs`), an image, a folder or a tar file of images.

    Of a table, `columns` are read if they are given.  With `client`, rows of this one alone.

    An .npy of uint8, float32 or float64 is mapped as it is: it may be larger than memory, and the
    tensor must not be written to.  Gray images get as many channels as a `shape` that is given has.
    """
    return read_named_inputs(path, shape, columns, client, client_column)[0]


def read_named_inputs(
    path: Path,
    shape: tuple[int, ...] = (),
    columns: Sequence[str] = (),
    client: str = "",
    client_column: str = DEFAULT_COLUMN,
) -> tuple[Tensor, list[str]]:
    """The same, and for images the names of their files, as they are in the folder or tar file."""
    if is_table(path):
        return read_table_inputs(path, shape, columns, client, client_column), []
    if path.is_dir():
        files = [image for image, _ in client_images(path)]
        x = ImageReader().read(((str(file), file) for file in files), len(files))
        return with_channels(x, shape), [str(file.relative_to(path)) for file in files]
    if path.is_file() and is_image(path):
        return with_channels(ImageReader().read([(str(path), path)], 1), shape), [path.name]
    if path.is_file() and is_tar(path):
        x, names = read_tar_images(path, ImageReader())
        return with_channels(x, shape), names
    return _read_numbers(path), []


def _read_numbers(path: Path) -> Tensor:
    if not path.exists():
        raise DataError(
            f"there is no file {path}: give an .npz, .npy, CSV or Parquet file, an image, or a "
            "folder or a tar file of images"
        )
    names, arrays = read_arrays(path, ("x",))
    if "x" not in arrays and len(names) != 1:
        raise DataError(f"{path} has {listed(names)} but no array x: store the inputs as x")
    x = arrays["x"] if "x" in arrays else next(iter(arrays.values()))
    if isinstance(x, np.memmap) and x.ndim > 1 and x.size and x.dtype in _MAPPABLE:
        with warnings.catch_warnings(action="ignore"):  # torch's, that the memory is read-only
            return torch.from_numpy(x)
    return as_inputs(x, str(path))


def read_client_file(
    path: Path,
    client_column: str,
    label_column: str | None,
    input_columns: Sequence[str],
    shape: tuple[int, ...] | None = None,
) -> Unnamed | None:
    """One client from its own file, as in a folder of them: an .npz, a tar file, or a table without
    a column of clients.  None if the file is a table of clients.
    """
    if path.suffix == ".npz":
        return _read_npz(path)
    if is_tar(path):
        return read_tar_client(path.name.partition(".")[0], [path], ImageReader())
    if not is_table(path) or client_column in read_arrow(path, ()).column_names:
        return None
    return read_csv_client(path, client_column, label_column, input_columns, shape)


def _find_kind(groups: Mapping[str, Path], path: Path) -> str:
    """What the clients of all groups are; .npz files may have others beside them."""
    kinds = {group: _find_kinds(folder) for group, folder in groups.items()}
    every = list(dict.fromkeys(kind for found in kinds.values() for kind in found))
    if not every:
        raise DataError(
            f"{path} has no .npz files, CSV files, tar files or folders of images: store one for "
            "each client"
        )
    kind = _NPZ if _NPZ in every else every[0]
    if len(every) > 1 and kind != _NPZ:
        raise DataError(f"{path} has {' and '.join(every)}: keep clients of one kind")
    if empty := [group for group, found in kinds.items() if kind not in found]:
        raise DataError(f"{groups[empty[0]]} has no {kind}: store one for each client")
    return kind


def _find_kinds(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise DataError(f"{folder} is a file: give a folder, or set data.source = 'table'")
    if any(folder.glob("*.npz")):
        return [_NPZ]
    there = {
        _CSV: any(map(is_csv, folder.iterdir())),
        _TARS: find_tar_clients(folder),
        _IMAGES: find_image_clients(folder),
    }
    return [kind for kind, found in there.items() if found]


def _read_npz(file: Path) -> Unnamed:
    names, arrays = read_arrays(file, ("x", "y"))
    if "x" not in arrays:
        raise DataError(f"{file} has {listed(names)} but no array x: store the inputs as x")
    x = as_inputs(arrays.pop("x"), str(file))
    y = arrays.pop("y", None)
    named = y is not None and y.dtype.kind == "U" and y.shape == (len(x),)
    labels = None if y is None or named else _labels(y, len(x), str(file))
    scalars = {name: a for name, a in arrays.items() if a.ndim == 0 and a.dtype.kind in "biufU"}
    known = {name: a.item() for name, a in scalars.items() if a.dtype.kind != "f" or np.isfinite(a)}
    client = ClientData(x, labels, file.stem, known)
    return Unnamed(client, y.tolist() if y is not None and named else None)


def _labels(y: Array, points: int, where: str) -> Tensor:
    if y.dtype.kind not in "biuf" or y.shape != (points,):
        raise DataError(
            f"{where} has labels of type {y.dtype} and shape {y.shape}: store one whole number per "
            f"point ({points}), from 0 on, -1 for no label"
        )
    if y.dtype.kind == "f":
        return read_float_labels(y, where)
    if y.size and y.dtype.kind == "u" and y.max() > np.iinfo(np.int64).max:
        raise DataError(f"{where} has the label {y.max()}: store whole numbers from 0 on")
    return torch.from_numpy(y.astype(np.int64))
