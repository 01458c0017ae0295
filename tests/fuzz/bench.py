"""Where a case works."""

import shutil
from pathlib import Path


class Bench:
    """A scratch folder with copies of the corpus, put right again by each case."""

    def __init__(self, source: Path, scratch: Path) -> None:
        self.source, self.scratch = source, scratch
        self.number = 0

    def copy(self, name: str) -> Path:
        target = self.fresh(name)
        origin = self.source / name
        if origin.is_dir():
            shutil.copytree(origin, target)
        else:
            shutil.copyfile(origin, target)
        return target

    def fresh(self, name: str) -> Path:
        """A place where nothing is yet; what the case before left is removed."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        return self.scratch / name
