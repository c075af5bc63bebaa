"""Any version of a stream, and from there its neighbors: for replays, restarts, bisections and
evaluations."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from importlib import import_module
from typing import Any, Self

from .._util.settings import checked_metadata
from .._util.threads import ordered_map
from ..errors import EmptyStream, InputError
from ..events import Metadata
from ..hints import absence
from ..store import Store
from ..store.base import UNREADABLE
from ..stream.manifest import Manifest
from ..sync.subscriber import Subscriber

_AT_ONCE = 8
_ROOT = re.compile(r"[0-9a-f]{8,64}")

_ORIGIN = re.compile(r"([^@ ]+)@([0-9]{1,12}) ([0-9a-f]{32})")
#: The key of the metadata that says from which version a stream was begun.
BEGUN_FROM = "begun_from"


class Checkout(Subscriber):
    """A verified version of a stream in host memory, made by `pulse_rl.checkout`, that moves to
    others (`to`).

    It is a `Subscriber` that also goes back: forward along patches and folds, and back from an
    anchor, for which there is a second state until it arrives. With a ``cache`` each payload is
    downloaded once. `files` and `save` are those of the version; the next `to` overwrites `state`.
    """

    _goes_back = True
    _listed: Collection[int] = ()

    @property
    def version(self) -> int:
        """Its number."""
        return self.manifest.version

    @property
    def metadata(self) -> Metadata:
        """What the publisher says of the version."""
        return dict(self.manifest.metadata)

    def versions(self) -> list[int]:
        """The versions that the stream has now, ascending. Raises EmptyStream and StoreError."""
        found = self._serial.run(lambda: self._failover.versions()[1])
        if not found:
            raise EmptyStream(
                f"stream {self.stream.name!r}: {absence(self.stream.store, self.stream.name)}"
            )
        self._listed = found
        return list(found)

    def state_dict(self) -> dict[str, Any]:
        """The state as torch tensors in host memory of their own, under all of its names, for
        ``model.load_state_dict``. Raises UnsupportedTensor for a dtype that this torch lacks."""
        # By its name: this package is below the integrations, and is there without torch.
        tensors: dict[str, Any] = import_module("pulse_rl.frameworks.torch").to_torch(self.state)
        return tensors

    def to(
        self,
        version: int | None = None,
        *,
        root: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Self:
        """Move to another version, and return this object.

        It takes the cheapest path of patches and folds from where it is, or from an anchor, which
        is the only way back. When it raises, it stays where it is.

        Args:
            version: The number of the version. Default of all three: the newest one.
            root: The newest version with this root, as for `pulse_rl.checkout`.
            metadata: The newest version with all of this metadata.
        Returns: This object.
        Raises:
            InputError: There is no such version, or more than one of the three is given.

        It also raises what `Subscriber.sync` raises.
        """
        target = self._found(version, root, metadata)
        if target is not None and target not in self._listed and target not in self.versions():
            name, first, last = self.stream.name, min(self._listed), max(self._listed)
            raise InputError(
                f"stream {name!r} has no version {target}: it has {first} to {last}",
                hint="`pulse log` shows them.",
            )
        self.sync(target)
        if self.status == "empty":
            self.versions()  # raises why there is none
        return self

    def __repr__(self) -> str:
        return f"<Checkout of version {self._host.version} of {self.stream.name!r}>"

    def _found(
        self, version: int | None, root: str | None, metadata: Mapping[str, Any] | None
    ) -> int | None:
        if sum(each is not None for each in (version, root, metadata)) > 1:
            raise InputError(
                "a version, a root or metadata say which version it is", hint="Give one of them."
            )
        if root is not None:
            if not isinstance(root, str) or not _ROOT.fullmatch(root):
                raise InputError(
                    f"{root!r} is not a root: 64 hexadecimal digits, or the first 8 and more"
                )
            found = self._last(lambda manifest: manifest.root.startswith(root))
            said = f"the root {root}"
        elif metadata is not None:
            facts = checked_metadata(metadata).items()
            found = self._last(lambda manifest: facts <= manifest.metadata.items())
            said = " ".join(f"{key}={value}" for key, value in facts)
        else:
            return version
        if found is None:
            hint = "`pulse log` shows what the versions have."
            raise InputError(f"no version of {self.stream.name!r} has {said}", hint=hint)
        return found

    def _last(self, fits: Callable[[Manifest], bool]) -> int | None:
        """The newest version whose manifest ``fits``; what cannot be read does not."""

        def look(version: int) -> int | None:
            try:
                return version if fits(self._failover.manifest(version)) else None
            except UNREADABLE:
                return None

        def search() -> int | None:
            with (
                self.stream.limited(),
                closing(ordered_map(look, self.versions()[::-1], _AT_ONCE)) as found,
            ):
                return next((version for version in found if version is not None), None)

        return self._serial.run(search)


def checkout(
    store: Store | str,
    stream: str,
    *,
    version: int | None = None,
    root: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
    **subscriber: Any,
) -> Checkout:
    """Return any version of a stream, verified: the exact bits of a policy.

    Args:
        store: The store or its address, or several, nearest first.
        stream: The stream's name.
        version: Its number.
        root: The newest version with this root: 64 hexadecimal digits, or the first 8 or more.
        metadata: The newest version with all of this metadata, such as ``{"step": 400}``. Without a
            ``version``, ``root`` or ``metadata``: the newest version.
        trusted_keys: As for `Subscriber`.
        stream_id: As for `Subscriber`.
        subscriber: Other settings of `Subscriber`: ``cache``, ``threads``, ``on_event`` and so on.
    Returns: The version, which moves to others.
    Raises:
        InputError: There is no such version.
        EmptyStream: There is no version at all.

    It also raises what `Subscriber` and its ``sync`` raise.

    ::

        with pulse_rl.checkout("s3://bucket/run", "policy", metadata={"step": 400}) as found:
            model.load_state_dict(found.state_dict())
            found.to(found.version - 1).save("policy-before")
    """
    reader = Checkout(
        store, stream=stream, trusted_keys=trusted_keys, stream_id=stream_id, **subscriber
    )
    return reader.to(version, root=root, metadata=metadata)


def begun_from(manifest: Manifest) -> Metadata:
    """What the metadata of a version say that has the same state as the one of ``manifest``, of
    another stream."""
    return {BEGUN_FROM: f"{manifest.stream}@{manifest.version} {manifest.stream_id}"}


def origin_of(manifest: Manifest) -> tuple[str, int, str] | None:
    """The stream, the version and the stream's ID of which this one says that it has the same
    state."""
    said = _ORIGIN.fullmatch(str(manifest.metadata.get(BEGUN_FROM)))
    return (said[1], int(said[2]), said[3]) if said else None
