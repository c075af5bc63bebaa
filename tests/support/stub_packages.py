"""Packages that a framework imports and that no CPU has: each name in them is an empty class."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Anything(type):
    """A class that is there to be named, with all attributes that are asked for."""

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
    def __init__(self, package: str, version: str) -> None:
        self._package, self._version = package, version

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        ours = name.partition(".")[0] == self._package
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = Stub(spec.name)
        if self._version:
            module.__version__ = self._version
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(package: str, version: str = "") -> None:
    """Stub a package unless it is installed."""
    if importlib.util.find_spec(package) is None:
        sys.meta_path.append(Finder(package, version))
