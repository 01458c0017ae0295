# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="union-attr, misc, attr-defined"
"""Image sets: every stored form gives the same images, and no damaged one gives any."""

import gzip
import hashlib
import io
import tarfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from flowdup.data.fetch import fetch
from flowdup.data.images import IDX, ROWS, Images, ImageSet, Layout, Part
from flowdup.data.sources import SOURCES, data_folder, named
from flowdup.errors import ConfigError, DataError

RANDOM = np.random.default_rng(0)
GREY = {
    "x_train": RANDOM.integers(0, 256, (6, 4, 5), dtype=np.uint8),
    "y_train": RANDOM.integers(0, 10, 6, dtype=np.uint8),
    "x_test": RANDOM.integers(0, 256, (3, 4, 5), dtype=np.uint8),
    "y_test": RANDOM.integers(0, 10, 3, dtype=np.uint8),
}
COLOUR = GREY | {
    "x_train": RANDOM.integers(0, 256, (6, 4, 5, 3), dtype=np.uint8),
    "x_test": RANDOM.integers(0, 256, (3, 4, 5, 3), dtype=np.uint8),
}


def idx(array: np.ndarray) -> bytes:
    head = b"\0\0\x08" + bytes([array.ndim])
    return head + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def rows(x: np.ndarray, y: np.ndarray) -> bytes:
    return b"".join(
        bytes([label]) + image[..., 0].tobytes() + image[..., 1].tobytes() + image[..., 2].tobytes()
        for image, label in zip(x, y, strict=True)
    )


GREY_FILES = {
    "train-images-idx3-ubyte": idx(GREY["x_train"]),
    "train-labels-idx1-ubyte": idx(GREY["y_train"]),
    "t10k-images-idx3-ubyte": idx(GREY["x_test"]),
    "t10k-labels-idx1-ubyte": idx(GREY["y_test"]),
}
COLOUR_FILES = {
    "data_batch_1.bin": rows(COLOUR["x_train"][:3], COLOUR["y_train"][:3]),
    "data_batch_2.bin": rows(COLOUR["x_train"][3:], COLOUR["y_train"][3:]),
    "test_batch.bin": rows(COLOUR["x_test"], COLOUR["y_test"]),
}


def source(
    name: str, channels: int, layout: Layout, algorithm: str, files: dict[str, bytes]
) -> ImageSet:
    parts = tuple(
        Part(file, len(data), f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}")
        for file, data in files.items()
    )
    return ImageSet(
        name, (channels, 4, 5), (0.5,) * channels, (0.5,) * channels, layout=layout, parts=parts
    )


SMALL_MNIST = replace(source("small-mnist", 1, IDX, "md5", GREY_FILES), places=("small-mnist",))
SMALL_CIFAR = replace(
    source("small-cifar", 3, ROWS, "sha1", COLOUR_FILES),
    places=SOURCES["cifar10"].places,
    archive=SOURCES["cifar10"].archive,
)


def tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def within(place: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{place}/{name}": data for name, data in files.items()}


PACKED = {f"{name}.gz": gzip.compress(data) for name, data in GREY_FILES.items()}
FORMS = {  # what may lie in the data folder, and of which set
    "mnist npz": (SMALL_MNIST, {"small_mnist.npz": npz(**GREY)}),
    "mnist files": (SMALL_MNIST, within("small-mnist", GREY_FILES)),
    "mnist packed": (SMALL_MNIST, within("small-mnist", PACKED)),
    "cifar npz": (SMALL_CIFAR, {"small_cifar.npz": npz(**COLOUR)}),
    "cifar files": (SMALL_CIFAR, within("cifar-10-batches-bin", COLOUR_FILES)),
    "cifar nested": (SMALL_CIFAR, within("cifar10/cifar-10-batches-bin", COLOUR_FILES)),
    "cifar archive": (SMALL_CIFAR, {"cifar-10-binary.tar.gz": tar(COLOUR_FILES)}),
    "cifar nested archive": (SMALL_CIFAR, {"cifar10/cifar-10-binary.tar.gz": tar(COLOUR_FILES)}),
}
every_form = pytest.mark.parametrize(("small", "files"), FORMS.values(), ids=FORMS)


def expected(small: ImageSet) -> Images:
    arrays = GREY if small is SMALL_MNIST else COLOUR

    def image(x: np.ndarray) -> torch.Tensor:
        return torch.tensor(x.reshape(len(x), 4, 5, -1)).permute(0, 3, 1, 2)

    return Images(
        image(arrays["x_train"]),
        torch.tensor(arrays["y_train"], dtype=torch.int64),
        image(arrays["x_test"]),
        torch.tensor(arrays["y_test"], dtype=torch.int64),
    )


def same(a: Images, b: Images) -> bool:
    return all(
        torch.equal(x, y) and x.dtype == y.dtype
        for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


@every_form
def test_every_stored_form_gives_the_same_images(small, files, tmp_path):
    write(tmp_path, files)
    assert same(small.load(tmp_path), expected(small))
    assert small.verify(tmp_path) == small.find(tmp_path)


def test_an_npz_with_wide_labels_is_read(tmp_path):
    wide = GREY | {"y_train": GREY["y_train"].astype(np.int64)}
    write(tmp_path, {"small_mnist.npz": npz(**wide)})
    assert same(SMALL_MNIST.load(tmp_path), expected(SMALL_MNIST))


@every_form
def test_a_flipped_pixel_is_found_in_every_form(small, files, tmp_path):
    """A value changes and the file stays well-formed, so only the hash can tell."""
    name, data = next(iter(files.items()))
    if name.endswith(".npz"):
        arrays = dict(GREY if small is SMALL_MNIST else COLOUR)
        arrays["x_train"] = arrays["x_train"].copy()
        arrays["x_train"][1, 2, 3] ^= 1
        data = npz(**arrays)
    elif name.endswith(".tar.gz"):
        data = tar({file: flipped(raw) for file, raw in COLOUR_FILES.items()})
    elif name.endswith(".gz"):
        data = gzip.compress(flipped(gzip.decompress(data)))
    else:
        data = flipped(data)
    write(tmp_path, {**files, name: data})
    message = refused(lambda: small.load(tmp_path))
    assert str(tmp_path / name) in message
    assert "is corrupt and is not used" in message
    assert f"`flowdup data fetch {small.name}`" in message


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        action()
    return str(caught.value)


@given(form=st.sampled_from(sorted(FORMS)), where=st.floats(0, 1, exclude_max=True), data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_flipped_or_missing_byte_goes_unnoticed(form, where, data):
    """Damage anywhere is a DataError, or lies in a byte that carries nothing (a date, say)."""
    small, files = FORMS[form]
    name = data.draw(st.sampled_from(sorted(files)))
    raw, at = files[name], int(where * len(files[name]))
    flip = bytes([raw[at] ^ data.draw(st.integers(1, 255))]) + raw[at + 1 :]
    with TemporaryDirectory() as folder:
        write(Path(folder), {**files, name: raw[:at] + data.draw(st.sampled_from([b"", flip]))})
        try:
            images = small.load(Path(folder))
        except DataError as error:
            assert "is corrupt and is not used" in str(error)
        else:
            assert same(images, expected(small))


@pytest.mark.parametrize(
    "damage",
    [
        lambda arrays: {"x_train": arrays["x_train"].swapaxes(1, 2)},
        lambda arrays: {"x_train": arrays["x_train"][:5]},
        lambda arrays: {"x_train": arrays["x_train"].reshape(-1)},
        lambda arrays: {"x_train": arrays["x_train"].astype(np.float32)},
        lambda arrays: {"x_test": np.concatenate([arrays["x_test"], arrays["x_test"]])},
        lambda arrays: {"y_train": np.array("seven")},
        lambda arrays: {"y_test": np.uint8(3)},
    ],
)
@pytest.mark.parametrize(("small", "arrays"), [(SMALL_MNIST, GREY), (SMALL_CIFAR, COLOUR)])
def test_wrong_arrays_in_an_npz_are_refused(small, arrays, damage, tmp_path):
    name = small.name.replace("-", "_")
    write(tmp_path, {f"{name}.npz": npz(**(arrays | damage(arrays)))})
    assert "is corrupt" in refused(lambda: small.load(tmp_path))


def test_a_missing_array_in_an_npz_is_named(tmp_path):
    write(tmp_path, {"small_mnist.npz": npz(x_train=GREY["x_train"], y_train=GREY["y_train"])})
    assert "no array 'x_test'" in refused(lambda: SMALL_MNIST.load(tmp_path))


def test_a_pickle_in_an_npz_is_not_opened(tmp_path):
    arrays = GREY | {"y_test": np.array([{"a": 1}], dtype=object)}
    np.savez(tmp_path / "small_mnist.npz", **arrays)
    assert "allow_pickle=False" in refused(lambda: SMALL_MNIST.load(tmp_path))


@pytest.mark.parametrize("name", ["small_mnist.npz", "small-mnist/train-images-idx3-ubyte.gz"])
def test_text_in_the_place_of_data_is_refused(name, tmp_path):
    write(tmp_path, {**within("small-mnist", PACKED), name: b"<html>404 not found</html>"})
    assert "is corrupt" in refused(lambda: SMALL_MNIST.load(tmp_path))


def test_a_file_with_more_than_it_should_have_is_refused(tmp_path):
    longer = {name: data + b"\0" for name, data in GREY_FILES.items()}
    write(tmp_path, within("small-mnist", longer))
    assert "is corrupt" in refused(lambda: SMALL_MNIST.load(tmp_path))


def endless_gzip(tmp_path):
    write(tmp_path, within("small-mnist", PACKED))
    with gzip.open(tmp_path / "small-mnist" / "train-images-idx3-ubyte.gz", "wb", 1) as file:
        for _ in range(64):
            file.write(bytes(2**20))
    return SMALL_MNIST


def endless_archive(tmp_path):
    write(tmp_path, {"cifar-10-binary.tar.gz": tar({"data_batch_1.bin": bytes(2**26)})})
    return SMALL_CIFAR


@pytest.mark.parametrize("make", [endless_gzip, endless_archive])
def test_a_packed_file_that_never_ends_is_read_no_further_than_it_should_go(make, tmp_path):
    """64 MiB of zeros, packed into some kB, in the place of some hundred bytes."""
    small = make(tmp_path)
    tracemalloc.start()
    try:
        assert "is corrupt" in refused(lambda: small.load(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_an_incomplete_set_is_missing(tmp_path):
    write(tmp_path, within("small-mnist", dict(list(GREY_FILES.items())[:3])))
    assert SMALL_MNIST.find(tmp_path) is None


def test_missing_data_says_where_it_was_sought_and_how_to_get_it(tmp_path):
    message = refused(lambda: named("mnist").load(tmp_path))
    assert str(tmp_path) in message
    assert "`flowdup data fetch mnist`" in message
    assert "FLOWDUP_DATA" in message


def test_an_unknown_set_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="digits, mnist, fashion-mnist, cifar10, femnist"):
        named("mnits")


def test_the_data_folder_is_the_users_choice_or_a_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FLOWDUP_DATA", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "own"
    monkeypatch.delenv("FLOWDUP_DATA")
    assert data_folder() == tmp_path / "cache" / "flowdup"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folder() == Path.home() / ".cache" / "flowdup"


def test_digits_are_split_in_their_order_and_fill_the_range(tmp_path):
    images = named("digits").load(tmp_path)
    assert images.x_train.shape == (1300, 1, 8, 8)
    assert images.x_test.shape == (497, 1, 8, 8)
    assert (images.x_train.dtype, images.y_train.dtype) == (torch.uint8, torch.int64)
    assert images.y_train[:3].tolist() == [0, 1, 2]
    levels = torch.cat([images.x_train, images.x_test]).unique().tolist()
    assert levels == [round(level * 255 / 16) for level in range(17)]
    unit = images.x_train.double() / 255
    assert unit.mean().item() == pytest.approx(SOURCES["digits"].mean[0], abs=1e-4)
    assert unit.std().item() == pytest.approx(SOURCES["digits"].std[0], abs=1e-4)
    assert named("digits").find(tmp_path) == named("digits").verify(tmp_path)


@pytest.mark.parametrize("damage", ["pixel", "label", "image"])
def test_digits_that_scikit_learn_bundles_otherwise_are_refused(damage, monkeypatch, tmp_path):
    bundle = load_digits()
    if damage == "image":
        bundle.data = bundle.data[:-1]
    else:
        (bundle.data[5] if damage == "pixel" else bundle.target)[20] += 1
    monkeypatch.setattr("sklearn.datasets.load_digits", lambda: bundle)
    for action in (named("digits").load, named("digits").verify):
        assert "reinstall scikit-learn" in refused(lambda action=action: action(tmp_path))


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_the_sizes_of_a_known_set_fit_its_images(name):
    known = SOURCES[name]
    channels, height, width = known.shape
    points = {"cifar10": 60_000}.get(name, 70_000)
    heads = 2 * 16 + 2 * 8 if known.layout is IDX else 0
    assert (
        sum(part.size for part in known.parts) == points * (1 + channels * height * width) + heads
    )
    assert len(known.mean) == len(known.std) == channels


class Shelf(BaseHTTPRequestHandler):
    """Serves `files`; what is in `short` breaks off halfway, as a lost connection does."""

    url: str
    files: dict[str, bytes]
    short: set[str]
    asked: list[str]

    def do_GET(self) -> None:
        name = self.path.removeprefix("/data/")
        self.asked.append(name)
        if name not in self.files:
            self.send_error(404)
            return
        data = self.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if name in self.short else data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def shelf(monkeypatch) -> Iterator[type[Shelf]]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = type("OneShelf", (Shelf,), {"files": dict(PACKED), "short": set(), "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        handler.url = f"http://127.0.0.1:{server.server_port}/data/"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield handler
        server.shutdown()
        thread.join()


def silent(name: str, done: int, total: int | None) -> None:
    pass


def stored(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_fetch_downloads_every_file_and_reports_its_bytes(shelf, tmp_path):
    reports: dict[str, tuple[int, int | None]] = {}
    online = replace(SMALL_MNIST, url=shelf.url)
    path = fetch(online, tmp_path, lambda name, done, total: reports.update({name: (done, total)}))
    assert path == tmp_path / "small-mnist"
    assert reports == {name: (len(data), len(data)) for name, data in PACKED.items()}
    assert stored(path) == sorted(PACKED)
    assert same(online.load(tmp_path), expected(SMALL_MNIST))


def test_fetch_downloads_an_archive(shelf, tmp_path):
    shelf.files["cifar-10-binary.tar.gz"] = tar(COLOUR_FILES)
    online = replace(SMALL_CIFAR, url=shelf.url)
    assert fetch(online, tmp_path, silent) == tmp_path / "cifar10" / "cifar-10-binary.tar.gz"
    assert same(online.load(tmp_path), expected(SMALL_CIFAR))


def test_fetch_leaves_good_files_and_replaces_corrupt_ones(shelf, tmp_path):
    first = next(iter(PACKED))
    write(tmp_path / "small-mnist", {**PACKED, first: PACKED[first][:-9]})
    fetch(replace(SMALL_MNIST, url=shelf.url), tmp_path, silent)
    assert shelf.asked == [first]


@every_form
def test_fetch_downloads_nothing_if_any_good_form_is_there(small, files, shelf, tmp_path):
    write(tmp_path, files)
    assert fetch(replace(small, url=shelf.url), tmp_path, silent) == small.find(tmp_path)
    assert shelf.asked == []


@pytest.mark.parametrize("trouble", ["not found", "corrupt", "interrupted"])
def test_a_failed_download_leaves_nothing_and_says_what_to_do(trouble, shelf, tmp_path):
    name = next(iter(PACKED))
    if trouble == "not found":
        del shelf.files[name]
    elif trouble == "corrupt":
        shelf.files[name] = gzip.compress(flipped(GREY_FILES[name.removesuffix(".gz")]))
    else:
        shelf.short.add(name)
    message = refused(lambda: fetch(replace(SMALL_MNIST, url=shelf.url), tmp_path, silent))
    assert shelf.url + name in message
    assert f"by hand and put it in {tmp_path / 'small-mnist'}" in message
    clue = {"not found": "404", "corrupt": "not the canonical file", "interrupted": "broke off"}
    assert clue[trouble] in message
    assert stored(tmp_path) == []


def test_a_machine_that_is_offline_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Shelf) as server:
        closed = f"http://127.0.0.1:{server.server_port}/data/"  # nobody listens once it is closed
    message = refused(lambda: fetch(replace(SMALL_MNIST, url=closed), tmp_path, silent))
    assert "cannot be downloaded" in message
    assert stored(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(shelf, tmp_path):
    (tmp_path / "small-mnist").write_text("in the way")
    message = refused(lambda: fetch(replace(SMALL_MNIST, url=shelf.url), tmp_path, silent))
    assert f"{tmp_path / 'small-mnist'}" in message
    assert "cannot be written" in message
