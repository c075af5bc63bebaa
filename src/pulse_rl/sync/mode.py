"""Patch or anchor: what a publisher stores for a version, as configured or by the model of `pulse_rl.plan`."""

from __future__ import annotations

from dataclasses import dataclass

from .._util.threads import default_threads, ordered_map
from .._util.units import parse_bandwidth
from ..errors import InputError
from ..patch import DEFAULT_BLOCK_ELEMENTS
from ..patch.blocks import Block, cut
from ..plan import METHODS, Scenario, make_plan
from ..state import bits
from ..state.tensors import State

MODES = ("patch", "anchor", "auto")


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether a version is an anchor alone, and why: "" if the library did not choose."""

    anchor: bool
    reason: str = ""


class ModeSelector:
    """What ``mode`` means for each version; raises InputError unless ``bandwidth`` (bit/s, or text such as "50Mbit") is
    given exactly when it is needed."""

    def __init__(self, mode: str, bandwidth: str | float | None, codec: str, threads: int | None) -> None:
        if mode not in MODES:
            raise InputError(f"unknown mode {mode!r}", hint=f"Choose one of: {', '.join(MODES)}.")
        if (mode == "auto") != (bandwidth is not None):
            raise InputError(
                f"mode {mode!r} {'needs a' if mode == 'auto' else 'takes no'} bandwidth",
                hint='Write mode="auto", bandwidth="50Mbit".',
            )
        if mode == "auto" and codec not in METHODS:
            raise InputError(f"the costs of codec {codec!r} are unknown", hint="Use 'history', 'context' or 'zstd'.")
        self._mode = mode
        self._codec = codec
        self._bandwidth = None if bandwidth is None else parse_bandwidth(bandwidth)
        self._threads = default_threads() if threads is None else threads

    def select(self, old: State, new: State) -> Choice:
        """Compares all bits of two states of the same tensors, then the predicted seconds from trainer to worker."""
        if self._bandwidth is None or new.elements == 0:
            return Choice(self._mode == "anchor")

        def changed(block: Block) -> int:
            return len(bits.differing(block.read(old), block.read(new)))

        changes = sum(ordered_map(changed, cut(old.specs, DEFAULT_BLOCK_ELEMENTS), self._threads))
        scenario = Scenario(
            params=new.elements,
            density=changes / new.elements,
            step_seconds=1.0,  # bears on utilisation only
            bandwidth=self._bandwidth,
            cores=self._threads,
            param_bytes=new.nbytes / new.elements,
        )
        methods = make_plan(scenario).methods
        patch, anchor = methods[self._codec].sync_seconds, methods["full"].sync_seconds
        return Choice(
            anchor < patch,
            f"{'anchor' if anchor < patch else 'patch'}: at density {scenario.density:.3%} and "
            f"{self._bandwidth / 1e6:g} Mbit/s a patch is expected to take {patch:.3g} s, an anchor {anchor:.3g} s",
        )
