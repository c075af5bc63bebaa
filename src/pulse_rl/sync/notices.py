"""What a publisher's listener is told once: that its states could be published in a better way."""

from __future__ import annotations

from ..events import Hint, Listener
from ..patch.blocks import cut
from ..state.cast import is_wide
from ..state.wrappers import is_wrapped
from .draft import Draft, PatchDraft

_DENSE = 0.5


class Notices:
    """Hands `Hint` to ``listener``, each kind once. ``stream`` is the stream's name."""

    def __init__(self, stream: str, listener: Listener | None) -> None:
        self._stream = stream
        self._listener = listener
        self._given: set[str] = set()

    def look_at(self, version: int, draft: Draft, *, crowded: bool) -> None:
        """Looks at the draft of a version that was committed. ``crowded``: whether a device lacked memory for it."""
        if self._listener is None:
            return
        if "device_memory" not in self._given and crowded:
            self._give(
                version,
                "device_memory",
                "a device had no memory to look for differences: its tensors crossed the bus whole",
                "Leave room for two copies of the state in the compute dtype, three where versions wait, or pass "
                "Publisher(on_device=None).",
            )
        if "wrapped_names" not in self._given and is_wrapped(draft.state):
            self._give(
                version,
                "wrapped_names",
                "names of tensors have parts that a wrapper of the module adds (module., _orig_mod. …)",
                "Publish pulse_rl.unwrapped(model.state_dict()), if the workers' engine knows the plain names.",
            )
        if "wide_dtype" not in self._given and (density := _wide_density(draft)) > _DENSE:
            self._give(
                version,
                "wide_dtype",
                f"{density:.0%} of all elements are FP32 or FP64 and changed: such patches save little",
                'Publish the compute dtype, of which a step changes few elements: publish(state, dtype="BF16"), '
                "or pulse publish --dtype BF16.",
            )

    def _give(self, version: int, kind: str, reason: str, hint: str) -> None:
        assert self._listener is not None
        self._given.add(kind)
        self._listener(Hint(self._stream, version, kind, reason, hint))


def _wide_density(draft: Draft) -> float:
    """Changed elements of FP32 and FP64 / all elements."""
    if not isinstance(draft, PatchDraft):
        return 0.0
    built = draft.built
    blocks = zip(cut(built.target.specs), built.header.blocks, strict=True)
    changed = sum(entry.changed for block, entry in blocks if is_wide(block.dtype))
    return changed / max(built.header.elements, 1)
