"""`flowdup predict` prints the name and probability of every point's class, or why it cannot."""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands.here import flowdup
from PIL import Image

from flowdup.data import InputSpec
from flowdup.models import build_network
from flowdup.personalize import PersonalModel, load_model
from flowdup.random import Stream

NAMES = ("ape", "bee", "[bold]cat[/bold]")


def make(path: Path, shape: tuple[int, ...], dtype: str) -> Path:
    spec = InputSpec(shape, dtype, 3, (0.5,), (0.1,), NAMES)
    weights = build_network("mlp", shape, 3, spec.reader()).init(Stream(3))
    PersonalModel("mlp", spec, weights).save(path)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    make(folder / "gray.safetensors", (1, 8, 8), "uint8")
    make(folder / "colour.safetensors", (3, 8, 8), "uint8")
    make(folder / "table.safetensors", (2,), "float32")
    return folder


def images(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def predict(model: Path, x: Any, folder: Path) -> tuple[int, str, str]:
    np.savez(folder / "x.npz", x=x)
    return flowdup("predict", model, "--input", folder / "x.npz")


def test_every_point_gets_a_line_with_probability_and_name(home: Path, tmp_path: Path) -> None:
    x = images(9, 1, 8, 8)
    code, out, _ = predict(home / "gray.safetensors", x, tmp_path)
    model = load_model(home / "gray.safetensors")
    best, classes = model.predict_proba(x).max(1)
    lines = zip(best.tolist(), classes.tolist(), strict=True)
    assert code == 0 and out.splitlines() == [f"{p:.3f} {NAMES[c]}" for p, c in lines]
    assert len({*classes.tolist()}) > 1  # else any name would do


def test_machines_get_classes_names_and_probabilities(home: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=images(4, 1, 8, 8))
    ended = flowdup("predict", home / "gray.safetensors", "--input", tmp_path / "x.npz", "--json")
    found = json.loads(ended.out)
    assert found["names"] == [NAMES[c] for c in found["classes"]]
    assert all(1 / 3 <= p <= 1 for p in found["probabilities"])


@pytest.mark.parametrize(
    ("model", "shape", "said"),
    [
        ("gray", (4, 8, 8, 1), "channels first"),
        ("gray", (4, 8, 8, 3), "channels first"),
        ("colour", (4, 8, 8, 3), "channels first"),
        ("colour", (4, 8, 8, 4), "channels first"),
        ("gray", (4, 3, 8, 8), "of 3 channels, and 1 is what is read"),
        ("colour", (4, 1, 8, 8), "of 1 channel, and 3 is what is read"),
        ("colour", (4, 4, 8, 8), "of 4 channels, and 3 is what is read"),
        ("gray", (4, 8, 8), "add the axis of channels"),
        ("gray", (4, 1, 9, 8), "has inputs of shape (1, 9, 8), the federation reads (1, 8, 8)"),
        ("gray", (4, 64), "has inputs of shape (64,), the federation reads (1, 8, 8)"),
    ],
)
def test_images_of_another_form_are_told_what_is_wrong(
    home: Path, tmp_path: Path, model: str, shape: tuple[int, ...], said: str
) -> None:
    code, out, error = predict(home / f"{model}.safetensors", images(*shape), tmp_path)
    assert code == 2 and not out and error.count("\n") == 1 and said in error, error


def test_gray_image_files_are_read_by_a_colour_model_and_not_the_reverse(
    home: Path, tmp_path: Path
) -> None:
    Image.fromarray(images(8, 8)).save(tmp_path / "gray.png")
    Image.fromarray(images(8, 8, 3)).save(tmp_path / "colour.png")
    for model, image, code in (("colour", "gray", 0), ("gray", "gray", 0), ("gray", "colour", 2)):
        words = (home / f"{model}.safetensors", "--input", tmp_path / f"{image}.png")
        assert flowdup("predict", *words).code == code


def test_a_clients_own_csv_is_read_without_its_labels(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "plain.csv").write_text("a,b\n1,2\n-3,4.5\n")
    (tmp_path / "own.csv").write_text("client,a,label,b,site\nal,1,bee,2,x\nal,-3,ape,4.5,x\n")
    (tmp_path / "more.csv").write_text("a,b,c,label\n1,2,3,bee\n")
    outs = [
        flowdup("predict", home / "table.safetensors", "--input", tmp_path / f"{name}.csv")
        for name in ("plain", "own", "more")
    ]
    assert outs[0].code == 0 and outs[0].out == outs[1].out
    assert (
        outs[2].code == 2 and "has inputs of shape (3,), the federation reads (2,)" in outs[2].error
    )


def test_images_in_files_are_told_by_their_names_in_the_order_in_which_they_are_read(
    home: Path, tmp_path: Path
) -> None:
    x = images(4, 8, 8)
    places = [
        "b.png",
        "bee/a.png",
        "bee/z\x1b\u202e.png",
        "cat/:cat:\u202f1.png",
    ]  # loose ones come first
    with tarfile.open(tmp_path / "own.tar", "w") as archive:
        for place, pixels in zip(places, x, strict=True):
            file = tmp_path / "own" / place
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
            archive.add(file, place)
    model = home / "gray.safetensors"
    _, plain, _ = predict(model, x[:, None], tmp_path)
    shown = [place.replace("\x1b\u202e", "??") for place in places]
    wanted = [f"{line}  {file}" for line, file in zip(plain.splitlines(), shown, strict=True)]
    assert len({*plain.splitlines()}) == 4  # else any order would do
    for source in ("own", "own.tar"):
        ended = flowdup("predict", model, "--input", tmp_path / source)
        assert (ended.code, ended.out.splitlines()) == (0, wanted)
    ended = flowdup("predict", model, "--input", tmp_path / "own", "--json")
    assert json.loads(ended.out)["files"] == places
    alone = flowdup("predict", model, "--input", tmp_path / "own" / "b.png")
    assert alone.out.splitlines() == [wanted[0]]
    assert "files" not in json.loads(
        flowdup("predict", model, "--input", tmp_path / "x.npz", "--json").out
    )
