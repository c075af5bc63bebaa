"""Checks what a live model holds: rehashes its tensors and compares them with a version's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import InputError
from ..state.checkpoint import as_state
from ..state.digest import StateDigest, state_digest
from ..state.tensors import State
from ..stream.manifest import Manifest, is_digest


class Module(Protocol):
    """Anything with a ``state_dict``, such as a torch module."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors by name."""
        ...


@dataclass(frozen=True, slots=True)
class AuditReport:
    """``ok`` if the live tensors, with root ``root``, are those of the version with root ``expected_root``.
    ``differing`` names tensors with different bits, dtypes or shapes, ``missing`` and ``unexpected`` those that only
    the version or only the model has; all are empty if only a root was given.
    """

    ok: bool
    root: str
    expected_root: str
    differing: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def audit(
    model: Module | Mapping[str, Any] | State, version: StateDigest | Manifest | str, *, threads: int | None = None
) -> AuditReport:
    """Rereads all live weights of ``model`` (a module, a mapping of names to tensors, or a `State`) and compares them
    with a version.

    ``threads``: the maximum number (None: one per core). ``version`` is the digest tree of a host state
    (`Subscriber.digest`), which names the tensors that differ, or a manifest or a root, which only tells whether any
    differ. Tied tensors are compared once. Raises InputError.
    """
    state = as_state(model.state_dict() if hasattr(model, "state_dict") else model)
    live = state_digest(state, threads=threads)
    if isinstance(version, StateDigest):
        return _compare(live, version, state.aliases)
    if not isinstance(version, Manifest | str):
        raise InputError(f"{type(version).__name__} is not a version", hint="Pass subscriber.digest or a root.")
    expected = version.root if isinstance(version, Manifest) else version
    if not is_digest(expected):
        raise InputError(f"{expected!r} is not a root", hint="A root has 64 hexadecimal digits.")
    return AuditReport(live.root == expected, live.root, expected, (), (), ())


def _compare(live: StateDigest, expected: StateDigest, aliases: dict[str, str]) -> AuditReport:
    # The model may store a tied tensor under another of its names than the trainer did.
    stored = {s.name: s.name for s in live.specs} | aliases
    specs = {s.name: s for s in live.specs}
    differing, missing, met = [], [], set()
    for spec in expected.specs:
        own = stored.get(spec.name)
        if own is None:
            missing.append(spec.name)
            continue
        met.add(own)
        same_kind = (specs[own].dtype, specs[own].shape) == (spec.dtype, spec.shape)
        if not same_kind or live.leaves[own] != expected.leaves[spec.name]:
            differing.append(spec.name)
    unexpected = [name for name in specs if name not in met]
    ok = not (differing or missing or unexpected)
    return AuditReport(ok, live.root, expected.root, tuple(differing), tuple(missing), tuple(unexpected))
