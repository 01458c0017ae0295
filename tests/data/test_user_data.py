# mypy: allow-untyped-defs, disable-error-code="union-attr, misc"
"""A user's own clients: what is read, and what is said of data that cannot be."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from flowdup.data.input_spec import InputSpec
from flowdup.data.user_data import read_folder, read_inputs, read_table
from flowdup.errors import DataError

ROWS = {
    "who": ["bo", "al", "bo", "al", "cy"],
    "picture": [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8, 9], [1, 1]],
        [[2, 2], [3, 3]],
        [[4, 4], [5, 5]],
    ],
    "width": [0.5, 1.5, 2.5, 3.5, 4.5],
    "height": [1, 2, 3, 4, 5],
    "label": [1, None, 0, None, 2],
    "site": ["north", "south", "north", "south", "north"],
    "age": [40, 50, 40, 51, 60],
}

TIMES = [
    pa.timestamp("ns"),
    pa.timestamp("us", "UTC"),
    pa.date32(),
    pa.time64("ns"),
    pa.duration("ns"),
]


def table(**changes: object) -> pa.Table:
    return pa.table({**ROWS, **changes})


def saved(folder: Path, rows: pa.Table) -> Path:
    """A dataset as `save_to_disk` of Hugging Face writes it, with a stale cache beside it."""
    folder.mkdir(parents=True)
    cuts = {"data-00000-of-00002.arrow": rows[:2], "data-00001-of-00002.arrow": rows[2:]}
    for name, part in {**cuts, "cache-1234.arrow": rows}.items():
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, rows.schema) as out,
        ):
            out.write_table(part)
    state = {"_data_files": [{"filename": name} for name in cuts], "_fingerprint": "1234"}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def parquet(path: Path, rows: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path)
    return path


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        action()
    return str(caught.value)


def test_a_folder_gives_one_client_per_file_in_the_order_of_names(tmp_path):
    np.savez(tmp_path / "b.npz", x=np.ones((2, 3)), y=np.array([1, -1]), site="north", angle=90.5)
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3), np.uint8), notes=np.arange(3))
    (tmp_path / "readme.txt").write_text("not a client")
    a, b = read_folder(tmp_path)["all"]
    assert (a.name, b.name) == ("a", "b")
    assert (a.x.dtype, b.x.dtype) == (torch.uint8, torch.float32)
    assert a.y is None
    assert b.y is not None and b.y.tolist() == [1, -1]
    assert (a.traits, b.traits) == ({}, {"site": "north", "angle": 90.5})


def test_sub_folders_are_the_groups(tmp_path):
    for group in ("train", "test"):
        (tmp_path / group).mkdir()
        np.savez(tmp_path / group / f"{group}er.npz", x=np.ones((1, 2)))
    groups = read_folder(tmp_path)
    assert {group: [client.name for client in clients] for group, clients in groups.items()} == {
        "train": ["trainer"],
        "test": ["tester"],
    }


def test_a_client_in_two_groups_is_refused(tmp_path):
    for group in ("train", "test"):
        (tmp_path / "folder" / group).mkdir(parents=True)
        np.savez(tmp_path / "folder" / group / "bo.npz", x=np.ones((1, 2)))
        parquet(tmp_path / "table" / group / "1.parquet", table()[:1])
    said = "is in train and in test: keep it in one of them"
    for action in (
        lambda: read_folder(tmp_path / "folder"),
        lambda: read_table(tmp_path / "table", "who", None, ["picture"]),
    ):
        message = refused(action)
        assert message.startswith("client 'bo' of ") and said in message


@pytest.mark.parametrize("kind", [np.int64, np.uint16, np.float16, np.float64, np.bool_, ">f4"])
def test_numbers_other_than_uint8_become_float32(kind, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([[0, 1]], kind))
    x = read_folder(tmp_path)["all"][0].x
    assert x.dtype == torch.float32
    assert x.tolist() == [[0, 1]]


def test_what_is_read_passes_the_check_of_the_federation(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((2, 3)), y=np.array([-1, -1], np.int8))
    client = InputSpec((3,), "float32", 4).check(read_folder(tmp_path)["all"][0])
    assert not client.labeled


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"images": np.ones(3), "y": np.ones(3, int)}, "has images, y but no array x"),
        ({"x": np.array(["a", "b"])}, "store them as numbers"),
        ({"x": np.ones(3, complex)}, "store them as numbers"),
        ({"x": np.array(3.0)}, "one row per point"),
        ({"x": np.ones(3)}, "inputs of shape (3,): store an array with one row per point"),
        ({"x": np.ones((3, 0))}, "of at least one number"),
        ({"x": np.ones((3, 2, 0), np.uint8)}, "of at least one number"),
        ({"x": np.ones((3, 1)), "y": np.ones(0, int)}, "shape (0,): store one whole number per"),
        ({"x": np.ones((3, 1)), "y": np.ones((3, 1), int)}, "one whole number per point (3)"),
        ({"x": np.array([{}], object)}, "allow_pickle=False"),
        ({"x": np.ones((3, 1)), "y": [0, 0.5, 1]}, "the label 0.5: flowdup is for classification"),
        ({"x": np.ones((2, 1)), "y": [0, np.inf]}, "the label inf: flowdup is for classification"),
        ({"x": np.ones((2, 1)), "y": [0, -2.0]}, "has the label -2: store whole numbers from 0 on"),
        ({"x": np.ones((2, 1)), "y": [0, 1e18]}, "has the label 1000000000000000000: store whole"),
        ({"x": np.ones((2, 1)), "y": [0.0, 1, 1]}, "shape (3,): store one whole number per point"),
    ],
)
def test_a_client_that_cannot_be_read_is_named(arrays, said, tmp_path):
    np.savez(tmp_path / "eve.npz", **arrays)
    message = refused(lambda: read_folder(tmp_path))
    assert str(tmp_path / "eve.npz") in message
    assert said in message


@pytest.mark.parametrize("kind", [np.float16, np.float32, ">f8", np.longdouble])
def test_whole_numbers_that_are_stored_as_floats_are_labels_and_nan_is_none(kind, tmp_path):
    y = np.array([0, 1, np.nan, -1, 2], kind)
    np.savez(tmp_path / "al.npz", x=np.ones((5, 2)), y=y)
    assert read_folder(tmp_path)["all"][0].y.tolist() == [0, 1, -1, -1, 2]


def test_whole_floats_of_a_table_are_labels_and_a_gap_is_none(tmp_path):
    columns = {"client": ["a"] * 4, "z": [1, 2, 3, 4], "label": [0.0, 1.0, None, float("nan")]}
    path = parquet(tmp_path / "t.parquet", pa.table(columns))
    assert read_table(path, "client", "label", ["z"])["all"][0].y.tolist() == [0, 1, -1, -1]
    half = pa.table(columns | {"label": [0.0, 1.0, None, 0.5]})
    message = refused(lambda: read_table(parquet(path, half), "client", "label", ["z"]))
    assert "column 'label' of" in message and "has the label 0.5: flowdup is for class" in message


def test_a_folder_without_clients_is_refused(tmp_path):
    assert "has no .npz files" in refused(lambda: read_folder(tmp_path))
    assert "there is no" in refused(lambda: read_folder(tmp_path / "nowhere"))


def parquet_file(folder: Path) -> Path:
    return parquet(folder / "clients.parquet", table())


def parquet_folder(folder: Path) -> Path:
    parquet(folder / "1.parquet", table()[:2])
    return parquet(folder / "2.parquet", table()[2:]).parent


def hugging_face_folder(folder: Path) -> Path:
    return saved(folder / "dataset", table())


@pytest.mark.parametrize("store", [parquet_file, parquet_folder, hugging_face_folder])
def test_rows_are_grouped_by_client_in_order_of_appearance(store, tmp_path):
    bo, al, cy = read_table(store(tmp_path), "who", "label", ["picture"], shape=(1, 2, 2))["all"]
    assert (bo.name, al.name, cy.name) == ("bo", "al", "cy")
    assert bo.x.tolist() == [[[[0, 1], [2, 3]]], [[[8, 9], [1, 1]]]]
    assert bo.x.dtype == torch.float32
    assert [client.y.tolist() for client in (bo, al, cy)] == [[1, 0], [-1, -1], [2]]


def test_a_dictionary_of_datasets_has_groups(tmp_path):
    saved(tmp_path / "train", table()[:4])
    saved(tmp_path / "validation", table()[4:])
    groups = read_table(tmp_path, "who", None, ["picture"])
    names = {group: [client.name for client in clients] for group, clients in groups.items()}
    assert names == {"train": ["bo", "al"], "validation": ["cy"]}


def test_columns_that_do_not_vary_within_a_client_are_its_traits(tmp_path):
    rows = table(age=[40, 50, 40, 51, None], id=[b"0", b"1", b"2", b"3", b"4"])
    path = parquet(tmp_path / "t.parquet", rows.drop(["width", "height"]))
    bo, al, cy = read_table(path, "who", "label", ["picture"])["all"]
    assert bo.traits == {"site": "north", "age": 40}
    assert al.traits == {"site": "south"}
    assert cy.traits == {"site": "north"}


def test_several_columns_of_numbers_make_a_vector(tmp_path):
    path = parquet(tmp_path / "t.parquet", table())
    bo, al, _ = read_table(path, "who", None, ["width", "height"])["all"]
    assert bo.x.tolist() == [[0.5, 1], [2.5, 3]]
    assert al.y is None
    assert read_table(path, "who", None, ["width"])["all"][0].x.tolist() == [[0.5], [2.5]]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.uint8()), pa.list_(pa.uint8(), 2), pa.large_list(pa.uint8())]
)
def test_bytes_in_any_kind_of_list_stay_bytes(kind, tmp_path):
    pixels = pa.array([[0, 255], [1, 2], [3, 4], [5, 6], [7, 8]], kind)
    path = parquet(tmp_path / "t.parquet", table(pixels=pixels))
    bo = read_table(path, "who", None, ["pixels"])["all"][0]
    assert bo.x.dtype == torch.uint8
    assert bo.x.tolist() == [[0, 255], [3, 4]]


def test_tensors_and_categories_are_read(tmp_path):
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(20.0).reshape(5, 2, 2))
    categories = pa.DictionaryArray.from_arrays([1, 0, 1, 0, 2], ["al", "bo", "cy"])
    path = parquet(tmp_path / "t.parquet", table(tensor=tensors, who=categories))
    bo, al, _ = read_table(path, "who", None, ["tensor"], shape=(2, 2))["all"]
    assert (bo.name, al.name) == ("bo", "al")
    assert bo.x.tolist() == [[[0, 1], [2, 3]], [[8, 9], [10, 11]]]


@pytest.mark.parametrize("kind", TIMES)
def test_times_are_neither_labels_nor_inputs_and_disturb_nothing_elsewhere(kind, tmp_path):
    path = parquet(tmp_path / "t.parquet", table(when=pa.array([1, 2, 1, 2, 3], kind)))
    assert "has labels of type" in refused(lambda: read_table(path, "who", "when", ["picture"]))
    assert "has inputs of type" in refused(lambda: read_table(path, "who", None, ["when"]))
    assert "when" not in read_table(path, "who", None, ["picture"])["all"][0].traits
    names = [client.name for client in read_table(path, "when", None, ["picture"])["all"]]
    assert len(set(names)) == 3


@pytest.mark.parametrize("labels", [pa.nulls(5), pa.array([None] * 5, pa.uint8())])
def test_labels_that_are_all_null_are_fine(labels, tmp_path):
    path = parquet(tmp_path / "t.parquet", table(label=labels))
    clients = read_table(path, "who", "label", ["picture"])["all"]
    assert not any(client.labeled for client in clients)


def test_a_missing_column_is_answered_with_those_there_are(tmp_path):
    path = parquet(tmp_path / "t.parquet", table())
    for columns in [("user", None, ["picture"]), ("who", "y", ["picture"]), ("who", None, ["x"])]:
        message = refused(lambda columns=columns: read_table(path, *columns))
        assert "has no column" in message
        assert "who, picture, width, height, label, site, age" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"picture": [[1], [1, 2], [1], [1], [1]]}, "lists of several lengths"),
        ({"picture": [[[1], [1, 2]]] * 5}, "lists of several lengths"),
        ({"picture": [[1], None, [1], [1], [1]]}, "has nulls, the first in row 1 (coun"),
        ({"picture": [[1], [None], [1], [1], [1]]}, "has nulls in lists"),
        ({"picture": ["a", "b", "c", "d", "e"]}, "inputs of type string"),
        ({"picture": [[{"bytes": b"png"}]] * 5}, "inputs of type struct"),
        ({"who": ["bo", None, "bo", "al", "cy"]}, "give every row a client"),
        ({"who": [["bo"]] * 5}, "give a column of names"),
        ({"label": [b"cat", b"dog", b"cat", b"dog", b"cat"]}, "labels of type binary"),
        ({"label": [0.0, 1.0, 2.5, 3.0, 4.0]}, "label 2.5: flowdup is for classification only"),
    ],
)
def test_a_column_that_cannot_be_used_is_named(changes, said, tmp_path):
    path = parquet(tmp_path / "t.parquet", table(**changes))
    message = refused(lambda: read_table(path, "who", "label", ["picture"]))
    assert f"column '{next(iter(changes))}' of {path}" in message
    assert said in message


def test_lists_that_differ_between_files_are_ragged(tmp_path):
    parquet(tmp_path / "1.parquet", pa.table({"who": ["a"], "x": [[1, 2]]}))
    parquet(tmp_path / "2.parquet", pa.table({"who": ["b"], "x": [[1, 2, 3]]}))
    assert "several lengths" in refused(lambda: read_table(tmp_path, "who", None, ["x"]))


def test_a_shape_that_does_not_fit_is_refused(tmp_path):
    path = parquet(tmp_path / "t.parquet", table())
    message = refused(lambda: read_table(path, "who", None, ["picture"], shape=(3, 2)))
    assert "points of 4 values" in message
    message = refused(lambda: read_table(path, "who", None, ["picture", "width"]))
    assert "one column of lists" in message


def test_points_without_a_value_are_refused(tmp_path):
    path = parquet(tmp_path / "t.parquet", table(picture=pa.array([[]] * 5, pa.list_(pa.int8()))))
    assert "of at least one number" in refused(lambda: read_table(path, "who", None, ["picture"]))


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "other columns", "state"])
@pytest.mark.parametrize("store", [parquet_folder, hugging_face_folder])
def test_a_damaged_table_is_refused(store, damage, tmp_path):
    folder = store(tmp_path)
    first = next(path for path in sorted(folder.iterdir()) if path.name.startswith(("1", "data")))
    if damage == "truncated":
        first.write_bytes(first.read_bytes()[:-100])
    elif damage == "other columns":
        parquet(folder / "3.parquet", pa.table({"z": [1]}))
        (folder / "state.json").unlink(missing_ok=True)
    elif damage == "state":
        (folder / "state.json").write_text("{}")
    else:
        first.write_bytes(b"" if damage == "empty" else b"who,picture\nbo,1\n")
    assert str(folder) in refused(lambda: read_table(folder, "who", None, ["picture"]))


def offsets(first: int) -> bytes:
    """Of five lists of four numbers, one after the other."""
    return np.arange(first, first + 24, 4, dtype=np.int32).tobytes()


@pytest.mark.parametrize(
    ("good", "bad"), [(offsets(0), offsets(4)), (b"boalbo", b"bo\xff\xffbo")], ids=["lists", "text"]
)
def test_buffers_that_say_what_cannot_be_are_refused_before_they_are_followed(good, bad, tmp_path):
    """The last list lies beyond the numbers; a client's name is no UTF-8."""
    flat = pa.array([[1.0, 2.0, 3.0, 4.0]] * 5, pa.list_(pa.float32()))
    rows, path = table(picture=flat), tmp_path / "t.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as out:
        out.write_table(rows)
    content = path.read_bytes()
    assert content.count(good) == 1
    path.write_bytes(content.replace(good, bad))
    told = refused(lambda: read_table(path, "who", None, ["picture"]))
    assert "is no readable table" in told


def test_a_table_without_rows_or_files_is_refused(tmp_path):
    assert "has no .parquet" in refused(lambda: read_table(tmp_path, "who", None, ["picture"]))
    path = parquet(tmp_path / "t.parquet", table()[:0])
    assert "has no rows" in refused(lambda: read_table(path, "who", None, ["picture"]))


def test_without_pyarrow_tables_say_what_to_install(tmp_path):
    path = parquet(tmp_path / "t.parquet", table())
    program = f"""
import sys
sys.modules["pyarrow"] = None  # what Python does with a module that is not there
from pathlib import Path
from flowdup.data.user_data import read_table
from flowdup.errors import ConfigError
try:
    read_table(Path({str(path)!r}), "who", None, ["picture"])
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'flowdup[data]'" in done.stdout


def test_inputs_are_the_array_x_or_the_only_one(tmp_path):
    x = np.arange(6, dtype=np.uint8).reshape(3, 2)
    np.savez(tmp_path / "named.npz", x=x, y=np.zeros(3))
    np.savez(tmp_path / "only.npz", pictures=x)
    np.save(tmp_path / "plain.npy", x)
    for name in ("named.npz", "only.npz", "plain.npy"):
        assert read_inputs(tmp_path / name).tolist() == x.tolist()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["u1", "<f4", "<f8"])
def test_an_npy_larger_than_memory_is_mapped(kind, tmp_path):
    rows, last = (1 << 40) // (1000 * np.dtype(kind).itemsize), np.arange(1000).astype(kind)
    with (tmp_path / "x.npy").open("wb") as file:  # a tebibyte, nearly all of it a hole
        head = {"descr": kind, "fortran_order": False, "shape": (rows, 1000)}
        np.lib.format.write_array_header_1_0(file, head)
        file.seek((rows - 1) * last.nbytes, 1)
        file.write(last.tobytes())
    x = read_inputs(tmp_path / "x.npy")
    assert x.shape == (rows, 1000)
    assert x[-1].tolist() == last.tolist()


@pytest.mark.parametrize("kind", [np.int32, ">f8", np.float16])
def test_an_npy_of_other_numbers_becomes_float32(kind, tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1, 2]], kind))
    x = read_inputs(tmp_path / "x.npy")
    assert (x.dtype, x.tolist()) == (torch.float32, [[1, 2]])


def test_inputs_keep_what_is_not_finite_for_the_check(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.array([[np.nan, 1e300]]))
    x = read_inputs(tmp_path / "x.npz")
    assert bool(x.isnan()[0, 0]) and bool(x.isinf()[0, 1])


def test_inputs_that_cannot_be_read_are_refused(tmp_path):
    np.savez(tmp_path / "two.npz", a=np.ones(2), b=np.ones(2))
    np.save(tmp_path / "words.npy", np.array(["a"]))
    np.save(tmp_path / "scalar.npy", np.array(1.0))
    np.save(tmp_path / "flat.npy", np.ones(3))
    np.save(tmp_path / "hollow.npy", np.ones((3, 0)))
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "short.npy", np.ones((100, 100)))
    (tmp_path / "short.npy").write_bytes((tmp_path / "short.npy").read_bytes()[:-1])
    np.savez(tmp_path / "none.npz")
    said = {
        "two.npz": "has a, b but no array x",
        "words.npy": "store them as numbers",
        "scalar.npy": "one row per point",
        "flat.npy": "one row per point",
        "hollow.npy": "of at least one number",
        "text.npz": "no readable NumPy file",
        "short.npy": "no readable NumPy file",
        "none.npz": "has nothing but no array x",
        "nowhere.npz": "there is no file",
        ".": "has no images",
    }
    for name, clue in said.items():
        assert clue in refused(lambda name=name: read_inputs(tmp_path / name))
