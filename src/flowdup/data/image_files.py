"""Images in files (PNG, JPEG, ...), read with Pillow: a folder per client, a folder per class."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowdup.data.client_groups import Unnamed
from flowdup.data.clients import ClientData
from flowdup.errors import ConfigError, DataError, shorten
from flowdup.memory import check_memory

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")  # no others: some start programs
_GRAY = ("1", "L", "LA")
_COLOUR = ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
_MOST_NUMBERS = 2**26  # of one image

Image = tuple[str, Path | IO[bytes]]  # where it is, for errors, and what is to be opened


class ImageReader:
    """Reads 8-bit images of one size, gray ones as [1, height, width], others as [3, ...].

    It remembers the first image, whose size all others must have, over several calls.
    """

    def __init__(self) -> None:
        self.first: tuple[str, tuple[int, int]] | None = None

    def read(self, images: Iterable[Image], count: int) -> Tensor:
        """uint8 [count, channels, height, width]; gray among coloured ones get equal channels."""
        pixels: NDArray[np.uint8] = np.empty((count, 1, 0, 0), np.uint8)
        for place, (where, source) in enumerate(images):
            image = self._decode(where, source)
            channels = max(len(image), pixels.shape[1])
            if not place:
                remedy = "split the client's images among several, or make them smaller"
                check_memory(count * image.size, where, remedy, DataError)
                pixels = np.empty((count, *image.shape), np.uint8)
            elif channels > pixels.shape[1]:
                pixels = np.repeat(pixels, channels, axis=1)
            pixels[place] = image
        return torch.from_numpy(pixels)

    def _decode(self, where: str, source: Path | IO[bytes]) -> NDArray[np.uint8]:
        try:
            from PIL import Image  # noqa: PLC0415  (an optional dependency)
        except ImportError as error:
            raise ConfigError("images need Pillow: run pip install 'flowdup[data]'") from error
        try:
            with Image.open(source, formats=_FORMATS) as image:
                self._check(where, image.size, image.mode)  # before it is unpacked
                pixels = np.asarray(image.convert("L" if image.mode in _GRAY else "RGB"))
        except DataError:
            raise
        except Exception as error:  # damage surfaces as anything from SyntaxError to struct.error
            raise DataError(
                f"{where} is no readable image ({shorten(error, 200)}): write it again or take it "
                "away"
            ) from error
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)

    def _check(self, where: str, size: tuple[int, int], mode: str) -> None:
        self.first = self.first or (where, size)
        other, expected = self.first
        if size != expected:
            raise DataError(
                f"{where} has {_size(size)} pixels and {other} has {_size(expected)}: resize all "
                "images to one size, for instance by Pillow's Image.resize"
            )
        if mode not in (*_GRAY, *_COLOUR):
            raise DataError(
                f"{where} has pixels of more than 8 bits ({mode}): convert it to 8 bits, or store "
                "the numbers in an .npz"
            )
        if 3 * size[0] * size[1] > _MOST_NUMBERS:
            raise DataError(
                f"{where} has {_size(size)} pixels, which are too many: make it smaller"
            )


def is_image(path: Path | str) -> bool:
    """By its name; hidden files are none."""
    name = Path(path).name
    return not name.startswith(".") and name.lower().endswith(SUFFIXES)


def find_images(folder: Path) -> list[Path]:
    """The image files right inside a folder, sorted."""
    return sorted(path for path in folder.iterdir() if is_image(path) and path.is_file())


def find_folders(folder: Path) -> list[Path]:
    """Those that are not hidden."""
    found = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(path for path in found if path.is_dir())


def find_image_clients(folder: Path) -> list[Path]:
    """The sub-folders with images, or with folders of images."""
    return [
        client
        for client in find_folders(folder)
        if any(map(find_images, [client, *find_folders(client)]))
    ]


def client_images(folder: Path) -> list[tuple[Path, str]]:
    """A client's images, each with its class: `class/*.png`, or `*.png`, which have none ("")."""
    images = [(image, "") for image in find_images(folder)]
    for inside in find_folders(folder):
        if deeper := [path for path in find_folders(inside) if find_images(path)]:
            raise DataError(
                f"{deeper[0]} has images too deep down: store them as client/class/*.png, or as "
                "client/*.png without labels"
            )
        images += [(image, inside.name) for image in find_images(inside)]
    if not images:
        raise DataError(f"{folder} has no images: store some as {', '.join(SUFFIXES)}")
    return images


def read_image_client(folder: Path, reader: ImageReader) -> Unnamed:
    """A client from a folder of images; some may have labels and others none."""
    images = client_images(folder)
    x = reader.read(((str(image), image) for image, _ in images), len(images))
    texts = [name for _, name in images]
    return Unnamed(ClientData(x, name=folder.name), texts if any(texts) else None)


def with_channels(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Gray images with three equal channels, if that is what is read."""
    if x.ndim != 4:
        return x
    return x.repeat(1, 3, 1, 1) if x.shape[1] == 1 and shape[:1] == (3,) else x


def with_equal_channels(groups: Mapping[str, Sequence[Unnamed]]) -> dict[str, list[Unnamed]]:
    """Gray clients among coloured ones get the same channel three times."""
    most = max((one.client.x.shape[1] for found in groups.values() for one in found), default=1)
    return {
        group: [one._replace(client=_repeat(one.client, most)) for one in found]
        for group, found in groups.items()
    }


def _repeat(client: ClientData, channels: int) -> ClientData:
    if client.x.shape[1] == channels:
        return client
    return replace(client, x=client.x.repeat(1, channels, 1, 1))


def _size(size: tuple[Any, Any]) -> str:
    return f"{size[0]}x{size[1]}"
