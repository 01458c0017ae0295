"""Points without labels from a table of any kind that training reads, all or one client's."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from flowdup.data.arrow_files import has_csv, is_arrow, is_csv, read_arrow
from flowdup.data.image_files import ImageReader, find_folders, find_images, with_channels
from flowdup.data.tables import ClientTable
from flowdup.data.tensors import listed
from flowdup.errors import DataError, shorten

DEFAULT_COLUMN = "client"  # that names whose rows they are
_LABELS = "label"


def is_table(path: Path) -> bool:
    """Whether it is a file of CSV, Parquet or Arrow, a Hugging Face dataset, or a folder of such
    files; one with images beside CSV files is a folder of images.
    """
    if is_arrow(path):
        return True
    if path.is_dir():
        return has_csv(path) and not any(map(find_images, (path, *find_folders(path))))
    return path.is_file() and is_csv(path)


def clients_named_in(path: Path, column: str = DEFAULT_COLUMN) -> list[str]:
    """Those that a table has rows of, by a column; none if it has no such column."""
    if not is_table(path):
        return []
    table = ClientTable(_read(path, column, (column,)), path, ImageReader())
    if column not in table.table.column_names:
        return []
    return list(map(str, table.codes(column)[1]))


def read_table_inputs(
    path: Path, shape: tuple[int, ...], columns: Sequence[str], client: str, client_column: str
) -> Tensor:
    """Points [n, ...] from `columns`, if these are given; else from the one column of lists or
    images, or all of numbers but `client_column` and `label`.

    With `client`, rows of this one alone.  Lists and numbers that are as many as in `shape` get it.
    """
    rows = _read(path, client_column, (client_column,) if client else ())
    if client:
        codes, names = ClientTable(rows, path, ImageReader()).codes(client_column)
        rows = rows.filter([code >= 0 and str(names[code]) == client for code in codes])
    table = ClientTable(rows, path, ImageReader(), client)
    there = rows.column_names
    if missing := [name for name in columns if name not in there]:
        raise DataError(
            f"{path} has no column '{shorten(missing[0])}', which the federation reads: add "
            f"it to {listed(there)}"
        )
    read = columns or _find_columns(table, shape, client_column)
    x = table.inputs(read, None)
    if table.is_image(read[0]):
        return with_channels(x, shape)
    return x.reshape(-1, *shape) if shape and prod(x.shape[1:]) == prod(shape) else x


def _find_columns(table: ClientTable, shape: tuple[int, ...], client_column: str) -> Sequence[str]:
    """Where the federation knows no names: lists or images, or else numbers."""
    there: list[str] = table.table.column_names
    if wide := [name for name in there if table.is_wide(name)]:
        if len(wide) > 1 and "x" not in wide:
            raise DataError(
                f"{table.path} has several columns of lists or images, {listed(wide)}: keep the "
                "inputs alone, or name them x"
            )
        return ["x"] if "x" in wide else wide
    if shape and len(there) > prod(shape):  # with labels or traits
        return table.number_columns((client_column, _LABELS))
    return there


def _read(path: Path, client_column: str, as_text: Sequence[str]) -> Any:
    rows = read_arrow(path, as_text)
    files = sum(map(is_csv, path.iterdir())) if path.is_dir() else 1
    if files > 1 and client_column not in rows.column_names:
        raise DataError(
            f"{path} has {files} CSV files without a column '{shorten(client_column)}', so that "
            "each is a client's own: give one of them"
        )
    return rows
