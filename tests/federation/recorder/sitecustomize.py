"""Python imports this first in every process of a federation: each frame that FLARE sends is copied
to a file in $RECORDED, before TLS hides it.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import threading
from types import ModuleType
from typing import Any

_WATCHED = "nvflare.fuel.f3.sfm.sfm_conn"


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: Any) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        original, lock = module.SfmConnection.send_frame, threading.Lock()
        path = os.path.join(os.environ["RECORDED"], f"{os.getpid()}.frames")

        def send_frame(self: Any, prefix: Any, headers: Any, payload: Any) -> Any:
            with lock, open(path, "ab") as file:
                file.write(repr(headers).encode() + b"\n")
                file.write(bytes(payload) if payload is not None else b"")
            return original(self, prefix, headers, payload)

        module.SfmConnection.send_frame = send_frame


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        spec.loader = _Loader(spec.loader)
        return spec


if "RECORDED" in os.environ:
    sys.meta_path.insert(0, _Finder())
