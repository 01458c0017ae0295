"""The public sets by name, and the folder that they are kept in."""

import os
from pathlib import Path

from flowdup.data.femnist import Femnist
from flowdup.data.images import ROWS, ImageSet, Part
from flowdup.errors import ConfigError

Source = ImageSet | Femnist


def _idx_parts(*md5: str) -> tuple[Part, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    parts = zip(names, sizes, md5, strict=True)
    return tuple(Part(f"{name}-ubyte", size, f"md5:{digest}") for name, size, digest in parts)


def _cifar_parts(*sha1: str) -> tuple[Part, ...]:
    names = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    parts = zip(names, sha1, strict=True)
    return tuple(Part(f"{name}.bin", 30_730_000, f"sha1:{digest}") for name, digest in parts)


_DIGITS = ImageSet("digits", (1, 8, 8), mean=(0.3059,), std=(0.3754,), layout=ROWS)
_MNIST = ImageSet(
    "mnist",
    (1, 28, 28),
    mean=(0.1307,),
    std=(0.3081,),
    parts=_idx_parts(
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ),
    places=("mnist",),
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
)
_FASHION_MNIST = ImageSet(
    "fashion-mnist",
    (1, 28, 28),
    mean=(0.2860,),
    std=(0.3530,),
    parts=_idx_parts(
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
    # the second is where Debian's package dataset-fashion-mnist puts them
    places=("fashion-mnist", "/usr/share/datasets/fashion-mnist"),
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
_CIFAR10 = ImageSet(
    "cifar10",
    (3, 32, 32),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    layout=ROWS,
    parts=_cifar_parts(
        "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        "aab85764eb3584312d3c7f65fd2fd016e36a258e",
        "26e2849e66a845b7f1e4614ae70f4889ae604628",
        "67eb016db431130d61cd03c7ad570b013799c88c",
    ),
    places=("cifar10", "cifar10/cifar-10-batches-bin", ".", "cifar-10-batches-bin"),
    url="https://www.cs.toronto.edu/~kriz/",
    archive="cifar-10-binary.tar.gz",
)
SOURCES: dict[str, Source] = {
    source.name: source for source in (_DIGITS, _MNIST, _FASHION_MNIST, _CIFAR10, Femnist())
}


def data_folder() -> Path:
    """Where sets are kept: $FLOWDUP_DATA, or `flowdup` in the user's cache folder."""
    if folder := os.environ.get("FLOWDUP_DATA"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowdup"


def named(name: str) -> Source:
    """The set of that name."""
    if name not in SOURCES:
        raise ConfigError(f"there is no image set '{name}': choose one of {', '.join(SOURCES)}")
    return SOURCES[name]
