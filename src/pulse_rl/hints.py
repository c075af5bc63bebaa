"""Hints: that states could be published in a better way, and that a worker may look for the wrong
stream."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeGuard

from ._util.settings import counted
from .errors import EmptyStream, PulseError, StoreError
from .events import Hint, Listener, Metadata, hint_to
from .follow.checkpoint import PEFT_HINT, adapter_names, fused_experts, is_wrapped
from .state.tensors import State
from .store.base import BoundedStore, Store, is_name
from .store.local import LocalStore
from .stream.manifest import Manifest
from .sync.pending import NO_SMALLER, PublishState

_log = logging.getLogger("pulse_rl")
_WIDE = 0.5
# RL's learning rates change a hundredth of the BF16 weights in a step, at the end of a warm-up
# three times that.
_DENSE = 0.2
_PATIENT_SECONDS = 1.0
_SHOWN_STREAMS = 10
MAX_STREAMS = 10_000


class Notices:
    """Gives each kind of `Hint` on what is published once. ``stream`` is the stream's name. Without
    a ``listener`` all users see them, of several ranks the ``first`` one's."""

    def __init__(self, stream: str, listener: Listener | None, *, first: bool = True) -> None:
        self._stream = stream
        self._listener = listener
        self._silent = listener is None and not first
        self._given: set[str] = set()
        self._looked = self._continued = False

    def continues(self, head: Manifest, metadata: Metadata) -> None:
        """Log once that a stream is continued after ``head``, and each ``step`` that goes back."""
        before, now = head.metadata.get("step"), metadata.get("step")
        if not self._continued:
            step = "" if before is None else f", step={before}"
            _log.info("continues %s after version %d%s", self._stream, head.version, step)
        if _is_number(before) and _is_number(now) and now < before:
            _log.warning(
                "stream %s: step %s follows step %s of version %d. Where another run was meant, "
                "publish it under another name",
                self._stream,
                now,
                before,
                head.version,
            )
        self._continued = True

    def check_published(
        self, version: int, draft: PublishState, state: State, mixed: Sequence[str]
    ) -> None:
        """Looks at this rank's part of a version that was committed, the ``state`` that it was made
        of, and its tensors that were cast although most were narrow (``mixed``)."""
        if self._silent:
            return
        # A patch has the names of the version before.
        looked, self._looked = self._looked and draft.base is not None, True
        names = [] if looked else _names(state, mixed)
        for kind, reason, hint in [*names, *_changes(draft)]:
            if kind not in self._given:
                self._given.add(kind)
                hint_to(self._listener, Hint(self._stream, version, kind, reason, hint))


def _names(state: State, mixed: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(kind, reason, hint) of what the tensors' names show, and of those that were cast."""
    if mixed:
        yield (
            "mixed_dtypes",
            f"{counted(len(mixed), 'tensor')} ({mixed[0]!r} …) of FP32, or wider than most of the "
            "state, were cast: router biases and norms lose bits",
            "To publish them as they are, give publish() State.of(state, keep=[name patterns]). "
            "dtype=None publishes each tensor in its own dtype.",
        )
    if names := adapter_names(state):
        yield "adapter_names", f"the state has the tensor {names[0]!r} of a PEFT model", PEFT_HINT
    if is_wrapped(state):
        yield (
            "wrapped_names",
            "names of tensors have parts that a wrapper of the module adds (module., _orig_mod. …)",
            "Publish pulse_rl.unwrapped(model.state_dict()), if the workers' engine knows the "
            "plain names.",
        )
    if fused := fused_experts(state.specs):
        yield (
            "fused_names",
            f"{counted(len(fused), 'tensor')} with several experts each ({fused[0]!r} …), as "
            "transformers has them in memory",
            "If the model's checkpoint has its experts one by one, as most do, publish "
            "pulse_rl.frameworks.transformers.checkpoint_weights(model): engines know the "
            "checkpoint's names.",
        )


def _changes(draft: PublishState) -> Iterator[tuple[str, str, str]]:
    """The same of what has changed."""
    elements = max(sum(segment.elements for segment in draft.segments), 1)
    if draft.reason.startswith(NO_SMALLER):  # as if all had changed
        changed = [(s.spec.dtype, s.elements) for s in draft.segments]
    else:
        coded = zip(draft.blocks, draft.coded, strict=False)
        changed = [(block.dtype, encoded.changed) for block, encoded in coded]
    density = sum(count for _, count in changed) / elements
    # Floats of more than two bytes are wider than compute dtypes.
    wide = sum(count for dtype, count in changed if dtype.exponent and dtype.width > 2) / elements
    if wide > _WIDE:
        yield (
            "wide_dtype",
            f"{wide:.0%} of all elements are FP32 or FP64 and changed: such patches save little",
            "Publish the compute dtype, of which a step changes few elements: publish(state, "
            'dtype="BF16"), or pulse publish --dtype BF16.',
        )
    elif density > _DENSE:
        yield (
            "dense",
            f"{density:.0%} of all elements changed: such patches save little",
            "At RL's learning rates, 1e-6 to 1e-5, a step changes about 1% of the BF16 weights; "
            "`pulse study` measures checkpoints.",
        )


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class EmptyStreamHint:
    """Says once that a worker has found no version of ``stream`` in ``store`` for a second."""

    def __init__(self, store: Store, stream: str, listener: Listener | None) -> None:
        self._store = store
        self._stream = stream
        self._listener = listener
        self._since: float | None = None
        self._said = False

    def poll(self) -> None:
        """A look has found nothing."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if self._said or now - self._since < _PATIENT_SECONDS:
            return
        self._said = True
        hint = (
            "The worker goes on looking. Check the stream's name and the store's address, or "
            "wait for the trainer."
        )
        try:
            reason = absence(self._store, self._stream)
        except PulseError:  # a store that cannot list all that it has
            reason = f"there is no version of it in {self._store!r} yet"
        hint_to(self._listener, Hint(self._stream, None, "no_stream", reason, hint))


def empty(store: Store, stream: str) -> EmptyStream:
    """The error of a stream that has no version. Raises StoreError."""
    return EmptyStream(f"stream {stream!r}: {absence(store, stream)}")


def absence(store: Store, stream: str) -> str:
    """That the store has no version of ``stream``, and which streams it has. Raises StoreError."""
    bare = store
    while isinstance(bare, BoundedStore):
        bare = bare.store
    root = bare.root if isinstance(bare, LocalStore) else None
    if root is not None and not root.exists():
        return f"there is no version of it yet: the folder {root} does not exist"
    found = [repr(name) for name in islice(streams_in(store), _SHOWN_STREAMS + 1)]
    if len(found) > _SHOWN_STREAMS:
        found[-1] = "…"
    there = f"has the streams {', '.join(found)}" if found else "has no streams"
    return f"there is no version of it yet: {store!r} {there}"


def streams_in(store: Store) -> Iterator[str]:
    """The names of the streams in ``store`` that have versions, in order, of the first
    `MAX_STREAMS` folders. A request or two each."""
    after: str | None = None
    for _ in range(MAX_STREAMS):
        first = next(iter(store.list("", after)), None)
        if first is None:
            return
        if after is not None and first.name <= after:
            raise StoreError(
                f"{store!r} does not begin a list after {after}",
                hint="Try the store with `pulse store-check`.",
            )
        folder, inside, _ = first.name.partition("/")
        if inside and is_name(folder) and any(True for _ in store.list(f"{folder}/versions")):
            yield folder
        after = f"{folder}0" if inside else folder  # "0" is the character after "/"
