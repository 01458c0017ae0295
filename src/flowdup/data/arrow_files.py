"""Files of tables: Parquet, Arrow (Hugging Face `save_to_disk`) and CSV, read with pyarrow."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowdup.data.tensors import listed
from flowdup.errors import ConfigError, DataError, shorten
from flowdup.memory import check_memory
from flowdup.strict_json import get_text, read_object

_PARQUET = b"PAR1"  # what such a file begins with


def read_arrow(path: Path, as_text: Sequence[str]) -> Any:
    """A pyarrow.Table with all rows of a file or folder, its buffers validated.

    The columns `as_text` of a CSV are read as they are written; others as numbers where they are.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415  (an optional dependency)
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("tables need pyarrow: run pip install 'flowdup[data]'") from error

    def read(file: Path) -> Any:
        if file.suffix == ".arrow":
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                return stream.read_all()
        if is_csv(file):
            return _read_csv(file, as_text)
        with ParquetFile(file) as parquet:
            _check_parquet(parquet.metadata, file)
            return parquet.read()

    try:
        files = _table_files(path)
        parts = [read(file) for file in files]
        whole = all(map(is_csv, files)) and _check_columns(parts, files)
        table = pa.concat_tables(parts, promote_options="permissive" if whole else "none")
        table.validate(full=True)  # a file's offsets are followed without a check from here on
        return table
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, MemoryError, pa.ArrowException) as error:
        why = shorten(error, 300)
        raise DataError(f"{path} is no readable table ({why}): write it again") from error


def is_csv(path: Path) -> bool:
    """Whether a file's name says that it is CSV or TSV; hidden files are none."""
    return path.name.lower().endswith((".csv", ".tsv")) and not path.name.startswith(".")


def is_arrow(path: Path) -> bool:
    """Whether it is a file of Parquet or Arrow, by its name or as Parquet by how it begins, or a
    folder with one, or a Hugging Face dataset.
    """
    if path.is_dir():
        return (path / "state.json").is_file() or any(map(_is_named_arrow, path.iterdir()))
    if not path.is_file() or _is_named_arrow(path):
        return path.is_file()
    with path.open("rb") as content:
        return content.read(len(_PARQUET)) == _PARQUET


def has_csv(path: Path) -> bool:
    """Whether it is such a file, or a folder with one."""
    return any(map(is_csv, path.iterdir())) if path.is_dir() else is_csv(path)


def _read_csv(file: Path, as_text: Sequence[str]) -> Any:
    from pyarrow import csv, string  # noqa: PLC0415  (an optional dependency)

    check_memory(8 * file.stat().st_size, str(file), "write a table of fewer rows", DataError)
    with file.open("rb") as content:
        head = content.readline(2**20)
    sign = max(",;\t", key=lambda sign: head.count(sign.encode()))
    found = csv.read_csv(
        file,
        parse_options=csv.ParseOptions(delimiter=sign),
        convert_options=csv.ConvertOptions(column_types={name: string() for name in as_text}),
    )
    if len({*found.column_names}) < len(found.column_names):
        raise DataError(f"{file} has two columns of one name: give each its own, in the first line")
    return found


def _check_columns(parts: Sequence[Any], files: Sequence[Path]) -> bool:
    for part, file in zip(parts, files, strict=True):
        if {*part.column_names} != {*parts[0].column_names}:
            raise DataError(
                f"{file} has the columns {listed(part.column_names)}, and {files[0]} has "
                f"{listed(parts[0].column_names)}: give all the same"
            )
    return True


def _check_parquet(metadata: Any, file: Path) -> None:
    """Refuse more values than fit in memory, of which a few bytes may tell."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    size = sum(8 * max(c.num_values, 0) + max(c.total_uncompressed_size, 0) for c in columns)
    size = max(size, 8 * metadata.num_rows)
    check_memory(size, str(file), "write a table of fewer rows", DataError)


def _is_named_arrow(path: Path) -> bool:
    return path.suffix in (".parquet", ".arrow")


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
    files = sorted(
        [*path.glob("*.parquet"), *path.glob("*.arrow"), *filter(is_csv, path.iterdir())]
    )
    if not files:
        raise DataError(f"{path} has no .parquet, .arrow or .csv files: give the folder with them")
    return files
