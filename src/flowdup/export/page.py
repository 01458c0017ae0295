"""The page that makes personal models in a browser (`web/`), as it is built into the package.

`make web-page` builds it, with Node.js, into the folder `page` of the package, from where wheels
take it along.  A wheel that was built without it has no such folder.
"""

from collections.abc import Mapping
from pathlib import Path

from flowdup.errors import CheckpointError, FlowdupError
from flowdup.export.bundle import CLASSIFIER, HYPERNETWORK, MANIFEST, SUMS, WEIGHTS
from flowdup.export.samples import ABOUT, POINTS
from flowdup.files import write_atomic

FOLDER = Path(__file__).parents[1] / "page"
BUNDLE = "bundle"  # the folder beside the page where it looks for one
_NEEDED = (MANIFEST, HYPERNETWORK, CLASSIFIER, WEIGHTS, SUMS)


def page_files(bundle: Path, page: Path = FOLDER) -> Mapping[str, Path]:
    """Every file that a browser may ask for, by its path below the page: the page's and a bundle's.

    CheckpointError if the folder has no bundle, FlowdupError if the page was not built.
    """
    if missing := [name for name in _NEEDED if not (bundle / name).is_file()]:
        raise CheckpointError(
            f"{bundle} is no bundle, it has no {missing[0]}: write one by "
            f"`flowdup export RUN --out {bundle}`"
        )
    if not (page / "index.html").is_file():
        raise FlowdupError(
            "this installation has no page: build it by `make web-page` in a checkout of flowdup "
            "(needs Node.js 20) and install again, or use a wheel that was built with it"
        )
    samples = [name for name in (POINTS, ABOUT) if (bundle / name).is_file()]
    found = {f"{BUNDLE}/{name}": bundle / name for name in (*_NEEDED, *samples)}
    own = {path.relative_to(page).as_posix(): path for path in page.rglob("*") if path.is_file()}
    return own | found


def write_site(bundle: Path, out: Path, page: Path = FOLDER) -> int:
    """Copy page and bundle into a folder that any web server can serve; how many files."""
    files = page_files(bundle, page)
    for name, path in files.items():
        write_atomic(out / name, path.read_bytes())
    return len(files)
