"""A journey: the files of the library that one call passes through, in all of its threads."""

from __future__ import annotations

import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pulse_rl

LIBRARY = str(Path(pulse_rl.__file__).parent) + "/"


#: The modules of the library that start threads by `_thread.start_new_thread`, which takes no
#: profile along.
STARTERS = ("_util.threads", "_util.serial", "stores.object")


class Journey:
    """The ``files`` entered while `recorded` is open. Threads are traced from their start, so make
    it before the objects whose threads are to be seen."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._recording = False
        threading.setprofile(self._trace)
        sys.setprofile(self._trace)
        for name in STARTERS:
            module = import_module(f"pulse_rl.{name}")
            assert module.start_new_thread is start_new_thread, f"{name} starts no thread"
            module.start_new_thread = self._start

    @contextmanager
    def recorded(self) -> Iterator[None]:
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def _start(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
        def traced() -> None:
            sys.setprofile(self._trace)
            work(*arguments)

        return start_new_thread(traced, ())

    def close(self) -> None:
        for name in STARTERS:
            import_module(f"pulse_rl.{name}").start_new_thread = start_new_thread
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._recording and event == "call":
            file = frame.f_code.co_filename
            if file.startswith(LIBRARY):
                self.files.add(file.removeprefix(LIBRARY))


@contextmanager
def journey() -> Iterator[Journey]:
    made = Journey()
    try:
        yield made
    finally:
        made.close()
