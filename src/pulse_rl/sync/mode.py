"""Dense or sparse: what a publisher that was told its link chooses for one version, by the model of `pulse_rl.plan`."""

from __future__ import annotations

from dataclasses import dataclass

from .._util.threads import default_threads, ordered_map
from ..errors import InputError
from ..patch.blocks import Block, cut
from ..patch.patch import DEFAULT_BLOCK_ELEMENTS
from ..plan import METHODS, Scenario, make_plan, parse_bandwidth
from ..state import bits
from ..state.tensors import State

MODES = ("sparse", "dense", "auto")


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether a version is an anchor alone, and why."""

    dense: bool
    reason: str


class Chooser:
    """What ``mode`` means for each version; raises InputError unless ``link`` (bit/s, or text such as "50Mbit") is
    given exactly where it is needed."""

    def __init__(self, mode: str, link: str | float | None, codec: str, threads: int | None) -> None:
        if mode not in MODES:
            raise InputError(f"there is no mode {mode!r}", hint=f"Choose one of: {', '.join(MODES)}.")
        if (mode == "auto") != (link is not None):
            raise InputError(
                f"mode {mode!r} {'needs a' if mode == 'auto' else 'has no use for a'} link",
                hint='Write mode="auto", link="50Mbit".',
            )
        if mode == "auto" and codec not in METHODS:
            raise InputError(f"nothing is known of the costs of codec {codec!r}", hint="Use 'context' or 'zstd'.")
        self._mode = mode
        self._codec = codec
        self._link = None if link is None else parse_bandwidth(link)
        self._threads = default_threads() if threads is None else threads

    def choose(self, old: State, new: State) -> Choice:
        """Compares all bits of two states of the same tensors, then the predicted seconds from trainer to worker."""
        if self._link is None or new.elements == 0:
            return Choice(self._mode == "dense", "")

        def changed(block: Block) -> int:
            return len(bits.differing(block.read(old), block.read(new)))

        changes = sum(ordered_map(changed, cut(old.specs, DEFAULT_BLOCK_ELEMENTS), self._threads))
        scenario = Scenario(
            params=new.elements,
            density=changes / new.elements,
            step_seconds=1.0,  # bears on utilisation only
            bandwidth=self._link,
            cores=self._threads,
            param_bytes=new.nbytes / new.elements,
        )
        methods = make_plan(scenario).methods
        sparse, dense = methods[self._codec].sync_seconds, methods["full"].sync_seconds
        word = "dense" if dense < sparse else "sparse"
        return Choice(
            dense < sparse,
            f"{word}: at density {scenario.density:.3%} and {self._link / 1e6:g} Mbit/s "
            f"a patch is expected to take {sparse:.3g} s, an anchor {dense:.3g} s",
        )
