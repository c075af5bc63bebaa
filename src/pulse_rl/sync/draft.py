"""The next version before it is stored: a patch from the baseline, or the full state (docs/protocol.md, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import StateMismatch
from ..events import PhaseTimer, progress_to
from ..patch import BuiltPatch, build_patch
from ..patch.history import History, Window
from ..state.digest import StateDigest, state_digest
from ..state.tensors import State
from ..stream.manifest import Manifest
from .host_state import HostState
from .remember import Memory, most_remembered

_SMALL = 1 << 16  # bytes: below that a request costs more than what it carries, and a patch needs no larger history


@dataclass(frozen=True, slots=True)
class PatchDraft:
    """A patch from version ``base`` to ``state``, the trainer's own memory. ``reason``: see `Published`."""

    state: State
    base: int
    built: BuiltPatch
    reason: str

    @property
    def target(self) -> StateDigest:
        return self.built.target

    @property
    def patch_bytes(self) -> int:
        return self.built.nbytes

    def history(self, baseline: HostState, version: int, memory: Memory) -> History:
        """What is remembered at ``version``, which this is to become."""
        state, records = baseline.state, self.built.records
        window = None if records is None else Window(1, baseline.digest.root, records)
        return memory.after(
            baseline.history, window, self.base, version, state.specs, state.nbytes, threads=baseline.threads
        )

    def take_effect(self, baseline: HostState, manifest: Manifest, history: History) -> None:
        """Moves the baseline to the version, which is committed."""
        baseline.advance(manifest.version, self.built, manifest.aliases, history)


@dataclass(frozen=True, slots=True)
class FullDraft:
    """A version without a patch. ``state`` is an own copy, which becomes the baseline, ``target`` its digest tree."""

    state: State
    target: StateDigest
    reason: str
    patch_bytes = 0

    def history(self, baseline: HostState, version: int, memory: Memory) -> History:
        """Nothing: newcomers start here."""
        return History()

    def take_effect(self, baseline: HostState, manifest: Manifest, history: History) -> None:
        """Makes the state the baseline."""
        baseline.adopt(manifest.version, self.state, self.target)


Draft = PatchDraft | FullDraft


def make_draft(
    baseline: HostState, state: State, *, codec: str, remember: bool, timer: PhaseTimer, owned: bool = False
) -> Draft:
    """Chooses and builds. Without a baseline, or with one of other tensors, no patch can be made.

    A patch that is no smaller than the state is dropped for an anchor. A tied tensor keeps the name under which the
    baseline stores it, in whatever order its names come now. Ends the phase "build". A state that is ``owned`` may
    become the baseline itself, any other is copied then. Raises what `build_patch` raises.
    """
    reason = ""
    if baseline.version is not None:
        state = state.stored_as({spec.name for spec in baseline.state.specs})
        reason = _difference(baseline.state, state)
    if baseline.version is not None and not reason:
        built = build_patch(
            baseline.state,
            state,
            baseline.digest,
            codec=codec,
            history=baseline.history if remember else None,
            most_records=most_remembered(state.nbytes) if remember else 0,
            threads=baseline.threads,
            progress=progress_to(baseline.listener, "diff", state.nbytes),
        )
        if built.nbytes < max(state.nbytes, _SMALL):
            timer.end("build")
            return PatchDraft(state, baseline.version, built, reason)
        reason = f"anchor: a patch would have {built.nbytes} bytes, the state has {state.nbytes}"
        del built  # before the state is copied
    own = state if owned else State.empty(state.specs, state.aliases)
    target = state_digest(
        own,
        source=None if owned else state,
        threads=baseline.threads,
        progress=progress_to(baseline.listener, "digest", state.nbytes),
    )
    timer.end("build")
    return FullDraft(own, target, reason)


def _difference(old: State, new: State) -> str:
    """Why no patch leads from ``old`` to ``new``; "" if one does."""
    try:
        new.require_specs(old.specs, "the version before")
    except StateMismatch as error:
        parted = [name for name, stored in old.aliases.items() if name in new and new.aliases.get(name, name) == name]
        joined = [name for name in new.aliases if name in old and old.aliases.get(name, name) == name]
        if parted:
            return f"anchor: tensor {parted[0]!r} is not tied to {old.aliases[parted[0]]!r} any more"
        if joined:
            return f"anchor: tensor {joined[0]!r} is tied to {new.aliases[joined[0]]!r} now"
        return f"anchor: {error}"
    return ""
