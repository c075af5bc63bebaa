"""Packages that modules of SGLang import and that no CPU has: each name in them is an empty
class."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = ("torchvision",)


class Anything(type):
    def __getattr__(cls, name: str) -> Any:
        return _made(cls, name)


class Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _made(self, name)


def _made(owner: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    made = Anything(name, (), {})
    setattr(owner, name, made)
    return made


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return (
            ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in PACKAGES else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = Stub(spec.name)
        module.__version__ = "0.28.0"  # of the torch that is installed; transformers asks
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Stubs those of `PACKAGES` that are not installed."""
    global PACKAGES
    PACKAGES = tuple(name for name in PACKAGES if importlib.util.find_spec(name) is None)
    sys.meta_path.append(Finder())
