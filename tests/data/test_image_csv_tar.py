# mypy: allow-untyped-defs, disable-error-code="union-attr, misc"
"""A user's own clients in folders of images, CSV files, tar shards and Hugging Face images."""

import io
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from flowdup import load, read_config, train_run
from flowdup.data import DataConfig, load_population
from flowdup.data.inspection import inspect_clients
from flowdup.data.user_data import read_folder, read_inputs, read_table
from flowdup.errors import ConfigError, DataError, FlowdupError
from flowdup.random import Stream

GRAY, COLOUR = (8, 8), (8, 8, 3)


def pixels(seed: int, shape: tuple[int, ...] = GRAY) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def encoded(seed: int, shape: tuple[int, ...] = GRAY, kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels(seed, shape)).save(content, kind)
    return content.getvalue()


def put(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return path


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(FlowdupError) as caught:
        action()
    assert isinstance(caught.value, DataError | ConfigError)
    return str(caught.value)


def config(path: Path, **more: Any) -> DataConfig:
    return DataConfig("folder", path=str(path), validation_clients=1, test_clients=1, **more)


# --- folders of images


def image_folder(folder: Path) -> Path:
    put(folder / "al" / "dog" / "1.png", encoded(0))
    put(folder / "al" / "cat" / "2.PNG", encoded(1))
    put(folder / "bo" / "eel" / "1.png", encoded(2))
    put(folder / "cy" / "1.png", encoded(3))  # no classes: a client without labels
    put(folder / "cy" / "._1.png", "a Mac was here")
    put(folder / "readme.txt", "not a client")
    return folder


def test_a_folder_of_images_names_classes_after_folders_of_all_clients(tmp_path):
    found = read_folder(image_folder(tmp_path))
    al, bo, cy = found["all"]
    assert (al.name, bo.name, cy.name) == ("al", "bo", "cy")
    assert found.class_names == ("cat", "dog", "eel")
    assert (al.y.tolist(), bo.y.tolist(), cy.y) == ([0, 1], [2], None)
    assert al.x.dtype == torch.uint8
    assert al.x.tolist() == [[pixels(1).tolist()], [pixels(0).tolist()]]


def test_images_with_and_without_a_class_may_stand_in_one_client(tmp_path):
    put(tmp_path / "al" / "b.png", encoded(0))
    put(tmp_path / "al" / "nan" / "a.png", encoded(1))  # a name like any other
    put(tmp_path / "bo" / "1" / "a.png", encoded(1))
    found = read_folder(tmp_path)
    assert found.class_names == ("1", "nan")
    assert [client.y.tolist() for client in found["all"]] == [[-1, 1], [0]]


def test_folders_named_by_numbers_are_sorted_as_numbers(tmp_path):
    for name in ("10", "9", "0"):
        put(tmp_path / "al" / name / "1.png", encoded(0))
    assert read_folder(tmp_path).class_names == ("0", "9", "10")


def test_classes_are_named_over_all_groups(tmp_path):
    put(tmp_path / "train" / "al" / "dog" / "1.png", encoded(0))
    put(tmp_path / "train" / "bo" / "cat" / "1.png", encoded(0))
    put(tmp_path / "test" / "cy" / "ape" / "1.png", encoded(0))
    found = load_population(config(tmp_path), Stream(0))
    assert found.spec.class_names == ("ape", "cat", "dog") and found.spec.classes == 3
    assert found.test[0].y.tolist() == [0]


def test_colour_comes_channels_first_and_gray_clients_get_equal_channels(tmp_path):
    put(tmp_path / "al" / "a" / "1.png", encoded(0, COLOUR))
    put(tmp_path / "bo" / "a" / "1.png", encoded(1))
    put(tmp_path / "cy" / "a" / "1.png", encoded(2))
    put(tmp_path / "cy" / "a" / "2.png", encoded(3, COLOUR))
    al, bo, cy = read_folder(tmp_path)["all"]
    assert np.array_equal(al.x[0].numpy(), pixels(0, COLOUR).transpose(2, 0, 1))
    assert np.array_equal(bo.x[0].numpy(), np.stack([pixels(1)] * 3))
    assert np.array_equal(cy.x[0].numpy(), np.stack([pixels(2)] * 3))
    assert np.array_equal(cy.x[1].numpy(), pixels(3, COLOUR).transpose(2, 0, 1))


def test_jpegs_are_read(tmp_path):
    put(tmp_path / "al" / "a" / "1.jpg", encoded(0, COLOUR, "JPEG"))
    put(tmp_path / "al" / "b" / "2.jpeg", encoded(1, COLOUR, "JPEG"))
    assert read_folder(tmp_path)["all"][0].x.shape == (2, 3, 8, 8)


def test_an_image_of_another_size_is_named_with_a_remedy(tmp_path):
    image_folder(tmp_path)
    other = put(tmp_path / "dan" / "cat" / "1.png", encoded(0, (8, 9)))
    message = refused(lambda: read_folder(tmp_path))
    assert f"{other} has 9x8 pixels" in message and "8x8" in message
    assert "resize all images to one size" in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no image at all", "no readable image"),
        (encoded(0)[:-30], "no readable image"),
        (encoded(0, (8, 8), "PPM"), "no readable image"),  # a kind that is not asked for
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "no readable image"),
    ],
    ids=["text", "truncated", "ppm", "postscript"],
)
def test_an_image_that_cannot_be_read_is_named(content, said, tmp_path):
    file = put(tmp_path / "al" / "cat" / "1.png", content)
    message = refused(lambda: read_folder(tmp_path))
    assert str(file) in message and said in message


def test_pixels_of_16_bits_are_refused_rather_than_cut(tmp_path):
    content = io.BytesIO()
    Image.fromarray(np.full((8, 8), 4000, np.uint16)).save(content, "PNG")
    put(tmp_path / "al" / "cat" / "1.png", content.getvalue())
    assert "more than 8 bits" in refused(lambda: read_folder(tmp_path))


def test_images_too_deep_down_are_not_passed_over(tmp_path):
    image_folder(tmp_path)
    put(tmp_path / "al" / "cat" / "more" / "1.png", encoded(0))
    message = refused(lambda: read_folder(tmp_path))
    assert str(tmp_path / "al" / "cat" / "more") in message and "client/class/*.png" in message


def test_clients_of_several_kinds_are_told_apart(tmp_path):
    put(image_folder(tmp_path) / "labels.csv", "a,label\n1,2\n")
    assert "has CSV files and folders of images" in refused(lambda: read_folder(tmp_path))


def test_a_group_without_clients_of_the_kind_is_refused(tmp_path):
    image_folder(tmp_path / "train")
    (tmp_path / "test").mkdir()
    assert f"{tmp_path / 'test'} has no folders of images" in refused(lambda: read_folder(tmp_path))


def test_one_class_or_another_number_of_them_is_refused(tmp_path):
    for name in ("al", "bo", "cy"):
        put(tmp_path / name / "cat" / "1.png", encoded(0))
    assert "are 'cat': give two" in refused(lambda: load_population(config(tmp_path), Stream(0)))
    put(tmp_path / "al" / "dog" / "1.png", encoded(0))
    wrong = config(tmp_path, classes=3)
    assert "names 2 classes (cat, dog)" in refused(lambda: load_population(wrong, Stream(0)))
    assert load_population(config(tmp_path, classes=2), Stream(0)).spec.classes == 2


def test_without_pillow_images_say_what_to_install(monkeypatch, tmp_path):
    image_folder(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)  # what Python does with a module not there
    message = refused(lambda: read_folder(tmp_path))
    assert "pip install 'flowdup[data]'" in message


# --- CSV


def test_a_csv_per_client_gives_columns_of_numbers_and_names_of_classes(tmp_path):
    put(tmp_path / "al.csv", "a,b,label,site\n1,2.5,dog,north\n3,4,cat,north\n")
    put(tmp_path / "bo.csv", "\ufeffb,a,site,client\n6,5,south,7\n")  # no labels, another order
    put(tmp_path / "cy.csv", "a;b;label\n7;8;\n9;1;ant\n")
    found = read_folder(tmp_path)
    al, bo, cy = found["all"]
    assert found.class_names == ("ant", "cat", "dog")
    assert al.x.dtype == torch.float32
    assert (al.x.tolist(), al.y.tolist()) == ([[1, 2.5], [3, 4]], [2, 1])
    assert (bo.x.tolist(), bo.y, bo.name) == ([[5, 6]], None, "bo")
    assert (cy.x.tolist(), cy.y.tolist()) == ([[7, 8], [9, 1]], [-1, 0])
    assert (al.traits, bo.traits, cy.traits) == ({"site": "north"}, {"site": "south"}, {})


def test_one_csv_has_a_column_of_clients(tmp_path):
    rows = "client,a,b,label,site\n007,1,2,1.0,x\n12,3,4,,y\n007,5,6,0,x\n12,7,8,NaN,y\n"
    path = put(tmp_path / "all.csv", rows)
    found = read_table(path, "client", "label", ("x",))
    first, second = found["all"]
    assert (first.name, second.name) == ("007", "12")
    assert first.x.tolist() == [[1, 2], [5, 6]]
    assert (first.y.tolist(), second.y.tolist()) == ([1, 0], [-1, -1])
    assert found.class_names == ()  # numbers are no names
    assert second.traits == {"site": "y"}
    named = read_table(path, "client", None, ("b", "a"), (1, 2))["all"][0]
    assert named.x.tolist() == [[[2, 1]], [[6, 5]]]


@pytest.mark.parametrize("word", ["NA", "N/A", "n/a", "null", "NULL", "None", "", "nan", "NaN "])
@pytest.mark.parametrize("names", [("no", "yes"), ("0", "1")])
def test_a_word_for_none_is_no_class(tmp_path, word, names):
    rows = "".join(f"al,1,{name}\n" for name in names)
    path = put(tmp_path / "all.csv", f"client,a,label\n{rows}bo,2,{word}\nbo,3,{names[1]}\n")
    found = read_table(path, "client", "label", ("x",))
    al, bo = found["all"]
    assert (al.y.tolist(), bo.y.tolist()) == ([0, 1], [-1, 1])
    assert found.class_names == (names if names[0] == "no" else ())
    told = [remark for remark in inspect_clients(path).remarks if "read as none" in remark]
    written = word.strip()
    assert len(told) == bool(written) and all(f"none: {written}; if" in text for text in told)


def test_a_column_without_a_name_is_an_input_only_where_it_is_named(tmp_path):
    rows = [("al", 1, 2, 0), ("al", 3, 4, 1), ("bo", 5, 6, 0)]
    text = "".join(f"{i},{','.join(map(str, row))}\n" for i, row in enumerate(rows))
    path = put(tmp_path / "all.csv", f",client,a,b,label\n{text}")
    found = read_table(path, "client", "label", ("x",))
    assert found.columns == ("a", "b")
    assert found["all"][0].x.tolist() == [[1, 2], [3, 4]]
    assert [client.traits for client in found["all"]] == [{}, {}]
    assert read_inputs(path, (2,)).tolist() == [[1, 2], [3, 4], [5, 6]]
    named = read_table(path, "client", "label", ("", "a"))
    assert named["all"][0].x.tolist() == [[0, 1], [1, 3]]
    put(tmp_path / "own" / "al.csv", ",a,label\n0,7,1\n1,8,0\n")
    put(tmp_path / "own" / "bo.csv", "a,label\n9,1\n")
    assert read_folder(tmp_path / "own")["all"][0].x.tolist() == [[7], [8]]


def test_whole_numbers_may_turn_into_others_far_down(tmp_path):
    """Behind the first megabyte, which some readers take a column's type from."""
    rows = "".join(f"al,{'1' * 9},0\n" for _ in range(90_000))
    path = put(tmp_path / "all.csv", f"client,a,label\n{rows}al,0.5,1\n")
    assert read_table(path, "client", "label", ("x",))["all"][0].x[-1].tolist() == [0.5]


def test_a_table_may_be_a_folder_of_csv_files(tmp_path):
    put(tmp_path / "1.csv", "client,a,b,label\nal,1,2,0\n")
    put(tmp_path / "2.csv", "label,client,a,b\ncat,al,1.5,3\n")
    found = read_table(tmp_path, "client", "label", ("x",))
    assert found["all"][0].x.tolist() == [[1, 2], [1.5, 3]]
    assert (found["all"][0].y.tolist(), found.class_names) == ([0, 1], ("0", "cat"))
    file = put(tmp_path / "2.csv", "client,a,c\nal,1,2\n")
    message = refused(lambda: read_table(tmp_path, "client", "label", ("x",)))
    assert f"{file} has the columns client, a, c" in message


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("a,b,label\n1,2,0.5\n3,4,1\n", "classification only"),
        ("a,b,label\n1,2,-7\n", "has the label -7: store whole numbers from 0 on"),
        ("a,b,label\n1,,1\n", "column 'b' of"),
        ("a,b,label\n1,red,1\n3,blue,0\n", "column 'b' of"),
        ("a,b,target\n1,2,0\n", "no CSV file like"),
        ("a,a,label\n1,2,0\n", "two columns of one name"),
        ("a,b,label\n1,2,0,4\n", "no readable table"),
        ("label\n1\n", "has no columns of numbers"),
        ("a,b,label\n", "has no rows"),
    ],
)
def test_a_csv_that_cannot_be_used_is_named(rows, said, tmp_path):
    file = put(tmp_path / "eve.csv", rows)
    message = refused(lambda: read_folder(tmp_path))
    assert said in message
    assert str(file) in message or str(tmp_path) in message


def test_csv_clients_with_other_columns_are_refused(tmp_path):
    put(tmp_path / "al.csv", "a,b,label\n1,2,0\n")
    file = put(tmp_path / "bo.csv", "a,c,label\n1,2,0\n")
    assert f"{file} has the inputs a, c" in refused(lambda: read_folder(tmp_path))


# --- tar shards


def test_tar_shards_are_read_where_they_are(tmp_path):
    points = {"000.png": encoded(0), "000.cls": b"dog\n", "001.png": encoded(1)}
    tar(tmp_path / "al.tar", {**points, "notes.txt": b"hi", "._000.cls": b"\xff"})
    tar(tmp_path / "bo" / "0.tar", {"0.cls": b"cat", "0.png": encoded(2)})
    tar(tmp_path / "bo" / "1.tar.gz", {"0.png": encoded(3), "0.cls": b"dog"}, "w:gz")
    tar(tmp_path / "cy.tgz", {"0.png": encoded(4)}, "w:gz")
    before = sorted(tmp_path.rglob("*"))
    found = read_folder(tmp_path)
    al, bo, cy = found["all"]
    assert (al.name, bo.name, cy.name) == ("al", "bo", "cy")
    assert found.class_names == ("cat", "dog")
    assert (al.y.tolist(), bo.y.tolist(), cy.y) == ([1, -1], [0, 1], None)
    assert al.x.tolist() == [[pixels(i).tolist()] for i in (0, 1)]
    assert bo.x.tolist() == [[pixels(i).tolist()] for i in (2, 3)]
    assert sorted(tmp_path.rglob("*")) == before


def test_labels_of_tar_shards_may_be_numbers(tmp_path):
    tar(tmp_path / "al.tar", {"a/0.png": encoded(0), "a/0.cls": b"3", "b/0.png": encoded(0)})
    found = read_folder(tmp_path)
    assert found.class_names == () and found["all"][0].y.tolist() == [3, -1]


def test_tar_files_that_cannot_be_read_are_named(tmp_path):
    file = tar(tmp_path / "al.tar", {"0.png": encoded(0)})
    whole = file.read_bytes()
    for content, said in ((b"hello", "no readable tar"), (whole[:560], "no readable")):
        file.write_bytes(content)
        message = refused(lambda: read_folder(tmp_path))
        assert said in message and str(file) in message
    tar(file, {"0.cls": b"1"})
    assert "has no images" in refused(lambda: read_folder(tmp_path))
    tar(file, {"0.png": encoded(0), "0.jpg": encoded(0)})
    assert "two images '0'" in refused(lambda: read_folder(tmp_path))


# --- Hugging Face


def hugging_face(
    path: Path, images: list[Any], labels: list[Any], names: list[str] | None = None
) -> Path:
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    who = ["al", "bo", "al"][: len(labels)]
    table = pa.table({"client": who, "image": pa.array(images, struct), "label": labels})
    if names is not None:
        label = {"names": names, "_type": "ClassLabel"}
        features = {"image": {"_type": "Image"}, "label": label}
        about = {"huggingface": json.dumps({"info": {"features": features}})}
        table = table.replace_schema_metadata(about)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def test_hugging_face_images_and_class_labels_are_read(tmp_path):
    put(tmp_path / "apart.png", encoded(1))
    images: list[Any] = [{"bytes": encoded(i), "path": f"{i}.png"} for i in (0, 1, 2)]
    images[1] = {"bytes": None, "path": "apart.png"}
    path = hugging_face(tmp_path / "all.parquet", images, [1, 0, -1], ["cat", "dog"])
    found = read_table(path, "client", "label", ("image",))
    al, bo = found["all"]
    assert found.class_names == ("cat", "dog")
    assert al.x.dtype == torch.uint8
    assert al.x.tolist() == [[pixels(0).tolist()], [pixels(2).tolist()]]
    assert bo.x.tolist() == [[pixels(1).tolist()]]
    assert (al.y.tolist(), bo.y.tolist()) == ([1, -1], [0])


def test_texts_in_a_table_name_the_classes_of_all_groups(tmp_path):
    images = [{"bytes": encoded(i), "path": None} for i in (0, 1, 2)]
    hugging_face(tmp_path / "train" / "1.parquet", images, ["dog", "cat", None])
    test = pa.table({"client": ["zoe"], "image": [encoded(3)], "label": ["ape"]})  # just bytes
    (tmp_path / "test").mkdir()
    pq.write_table(test, tmp_path / "test" / "1.parquet")
    found = read_table(tmp_path, "client", "label", ("image",))
    assert found.class_names == ("ape", "cat", "dog")
    assert [client.y.tolist() for client in found["train"]] == [[2, -1], [1]]
    assert found["test"][0].y.tolist() == [0]


def test_rows_without_an_image_are_named(tmp_path):
    path = hugging_face(tmp_path / "all.parquet", [{"bytes": b"?", "path": None}], [0])
    message = refused(lambda: read_table(path, "client", None, ("image",)))
    assert f"row 0 of column 'image' of {path} is no readable image" in message
    path = hugging_face(tmp_path / "all.parquet", [None], [0])
    assert "no image in row 0" in refused(lambda: read_table(path, "client", None, ("image",)))
    other = [{"bytes": encoded(0, s), "path": None} for s in (GRAY, (9, 9))]
    path = hugging_face(tmp_path / "all.parquet", other, [0, 1])
    assert "row 1 of column" in refused(lambda: read_table(path, "client", None, ("image",)))


def test_groups_that_name_their_classes_otherwise_are_refused(tmp_path):
    images = [{"bytes": encoded(0), "path": None}]
    hugging_face(tmp_path / "train" / "1.parquet", images, [0], ["cat", "dog"])
    hugging_face(tmp_path / "test" / "1.parquet", images, [0], ["dog", "cat"])
    message = refused(lambda: read_table(tmp_path, "client", "label", ("image",)))
    assert "name their classes otherwise" in message


# --- .npz, and single inputs


def test_texts_in_npz_files_name_the_classes(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((2, 3)), y=np.array(["dog", ""]))
    np.savez(tmp_path / "b.npz", x=np.ones((1, 3)), y=np.array(["cat"]))
    found = read_folder(tmp_path)
    assert found.class_names == ("cat", "dog")
    assert [client.y.tolist() for client in found["all"]] == [[1, -1], [0]]
    np.savez(tmp_path / "c.npz", x=np.ones((1, 3)), y=np.array([0]))
    assert "store all labels in one way" in refused(lambda: read_folder(tmp_path))


def test_inputs_are_read_from_images_tar_files_and_csv(tmp_path):
    one = put(tmp_path / "mine" / "1.png", encoded(0))
    put(tmp_path / "mine" / "2.png", encoded(1))
    both = [[pixels(0).tolist()], [pixels(1).tolist()]]
    assert read_inputs(one).tolist() == both[:1]
    assert read_inputs(one, (3, 8, 8)).shape == (1, 3, 8, 8)  # as the federation reads them
    assert read_inputs(tmp_path / "mine").tolist() == both
    members = {"1.png": encoded(0), "2.png": encoded(1)}
    assert read_inputs(tar(tmp_path / "mine.tar", members)).tolist() == both
    assert read_inputs(put(tmp_path / "mine.csv", "a,b\n1,2\n")).tolist() == [[1, 2]]
    for rows, said in (("a,b\n1,red\n", "inputs of type string"), ("a,b\n", "has no rows")):
        path = put(tmp_path / "mine.csv", rows)
        assert said in refused(lambda path=path: read_inputs(path))


# --- training


def csv_files(folder: Path) -> dict[str, Any]:
    for client in range(5):
        rows = "".join(f"{i % 2}.5,{i},{('cat', 'dog')[i % 2]}\n" for i in range(6))
        put(folder / f"c{client}.csv", f"a,b,label\n{rows}")
    return {"source": "folder", "path": str(folder)}


def one_csv(folder: Path) -> dict[str, Any]:
    rows = [f"{i % 2}.5,{i},{('cat', 'dog')[i % 2]},c{i % 5}\n" for i in range(30)]
    path = put(folder / "all.csv", f"a,b,kind,who\n{''.join(rows)}")
    columns = {"client_column": "who", "label_column": "kind"}
    return {"source": "table", "path": str(path), **columns}


def tar_files(folder: Path) -> dict[str, Any]:
    for client in range(5):
        labels = {f"{i}.cls": (b"cat", b"dog")[i % 2] for i in range(6)}
        tar(folder / f"c{client}.tar", {f"{i}.png": encoded(i) for i in range(6)} | labels)
    return {"source": "folder", "path": str(folder)}


def hugging_face_images(folder: Path) -> dict[str, Any]:
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = pa.array([{"bytes": encoded(i, COLOUR), "path": None} for i in range(30)], struct)
    who, labels = [f"c{i % 5}" for i in range(30)], [("cat", "dog")[i // 5 % 2] for i in range(30)]
    folder.mkdir(exist_ok=True)
    pq.write_table(
        pa.table({"client": who, "image": images, "label": labels}), folder / "1.parquet"
    )
    return {"source": "table", "path": str(folder), "input_columns": ["image"]}


@pytest.mark.parametrize("store", [csv_files, one_csv, tar_files, hugging_face_images])
def test_one_trains_on_it_and_predicts_names(store, tmp_path):
    data = store(tmp_path / "data") | {"validation_clients": 1, "test_clients": 1}
    settings = {"model": "mlp", "method": {"name": "fedavg"}, "engine": {"device": "cpu"}}
    small = read_config(settings | {"data": data, "server": {"rounds": 1, "cohort": 2}})
    assert len(list(train_run(small, tmp_path / "run"))) == 1
    stranger = load_population(small.data, Stream(1)).test[0]
    found = load(tmp_path / "run").personalize(stranger.x).predictions(stranger.x)
    assert {*found["names"]} <= {"cat", "dog"} and len(found["names"]) == 6
