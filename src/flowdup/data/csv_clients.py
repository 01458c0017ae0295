"""Clients from a folder with one CSV file for each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowdup.data.arrow_files import is_csv, read_arrow
from flowdup.data.client_groups import Unnamed
from flowdup.data.image_files import ImageReader
from flowdup.data.tables import ClientTable
from flowdup.data.tensors import listed
from flowdup.errors import DataError


def read_csv_clients(
    groups: Mapping[str, Path],
    client_column: str,
    label_column: str | None,
    input_columns: Sequence[str],
    shape: tuple[int, ...] | None,
) -> tuple[dict[str, list[Unnamed]], tuple[str, ...]]:
    """Clients by group, named after their files, whatever stands in a column of clients; and their
    inputs' columns.

    A file without the column of labels is a client without labels; at least one file has it.
    """
    found: dict[str, list[Unnamed]] = {}
    names: Sequence[str] = ()
    first, labeled = Path(), False
    for group, folder in groups.items():
        found[group] = []
        for file in sorted(filter(is_csv, folder.iterdir())):
            table = ClientTable(_read(file, client_column, label_column), file, ImageReader())
            own, guessed = table.input_names(input_columns, (client_column, label_column))
            first, names = (first, names) if names else (file, own)
            if {*own} != {*names}:
                raise DataError(
                    f"{file} has the inputs {listed(own)}, and {first} has {listed(names)}: give "
                    "all the same, or name them in data.input_columns"
                )
            label = label_column if label_column in table.table.column_names else None
            labeled |= label is not None
            found[group] += table.clients(client_column, label, names, shape, guessed)
    if label_column and not labeled:
        raise DataError(
            f"no CSV file like {first} has a column '{label_column}': name that of the labels in "
            "data.label_column, or set it to '' if there are none"
        )
    return found, tuple(names)


def read_csv_client(
    file: Path,
    client_column: str,
    label_column: str | None,
    input_columns: Sequence[str],
    shape: tuple[int, ...] | None,
) -> Unnamed:
    """The one client that a file is, with labels if it has the column of labels."""
    table = ClientTable(_read(file, client_column, label_column), file, ImageReader())
    names, guessed = table.input_names(input_columns, (client_column, label_column))
    label = label_column if label_column in table.table.column_names else None
    return next(iter(table.clients(client_column, label, names, shape, guessed)))


def _read(file: Path, client_column: str, label_column: str | None) -> Any:
    table = read_arrow(file, [label_column] if label_column else [])
    if client_column in table.column_names:
        table = table.drop_columns([client_column])
    return table.append_column(client_column, [[file.stem] * len(table)])
