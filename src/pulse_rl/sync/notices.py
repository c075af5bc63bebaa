"""What a publisher's listener is told once: that its states could be published in a better way."""

from __future__ import annotations

from ..events import Hint, Listener
from ..state.cast import is_wide
from ..state.checkpoint import fused_experts, is_wrapped
from ..state.tensors import State
from .pending import PendingVersion

_DENSE = 0.5


class Notices:
    """Hands `Hint` to ``listener``, each kind once. ``stream`` is the stream's name."""

    def __init__(self, stream: str, listener: Listener | None) -> None:
        self._stream = stream
        self._listener = listener
        self._given: set[str] = set()

    def look_at(self, version: int, draft: PendingVersion, state: State, *, crowded: bool) -> None:
        """Looks at this rank's part of a version that was committed, and the ``state`` that it was made of.
        ``crowded``: whether a device lacked memory for it."""
        if self._listener is None:
            return
        if "device_memory" not in self._given and crowded:
            self._give(
                version,
                "device_memory",
                "a device had no memory to look for differences: its tensors crossed the bus whole",
                "Leave room for two copies of the state in the compute dtype, three where versions wait, or pass "
                "on_device=None.",
            )
        if "wrapped_names" not in self._given and is_wrapped(state):
            self._give(
                version,
                "wrapped_names",
                "names of tensors have parts that a wrapper of the module adds (module., _orig_mod. …)",
                "Publish pulse_rl.unwrapped(model.state_dict()), if the workers' engine knows the plain names.",
            )
        if "fused_names" not in self._given and (fused := fused_experts(state.specs)):
            self._give(
                version,
                "fused_names",
                f"{len(fused)} tensors have several experts each ({fused[0]!r} …), as transformers has them in memory",
                "If the model's checkpoint has its experts one by one, as most do, publish "
                "pulse_rl.integrations.transformers.checkpoint_weights(model): engines know the checkpoint's names.",
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


def _wide_density(draft: PendingVersion) -> float:
    """Changed elements of FP32 and FP64 / all elements."""
    changed = sum(
        encoded.changed for block, encoded in zip(draft.blocks, draft.coded, strict=False) if is_wide(block.dtype)
    )
    return changed / max(sum(segment.elements for segment in draft.segments), 1)
