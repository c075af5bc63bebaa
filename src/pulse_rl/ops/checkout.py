"""Any version of a stream, and from there its neighbors: for replays, restarts, bisections and
evaluations."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from importlib import import_module
from typing import Any, Self

from .._util.serial import Closing, NotCopyable
from .._util.threads import ordered_map
from ..errors import EmptyStream, InputError
from ..events import Listener, Metadata
from ..hints import absence
from ..state.tensors import State
from ..store import Store
from ..stream.manifest import Manifest, checked_metadata
from ..stream.unreadable import UNREADABLE
from ..sync.subscriber import Subscriber

_AT_ONCE = 8
_ROOT = re.compile(r"[0-9a-f]{8,64}")


class _Reader(Subscriber):
    """A subscriber that goes back, too."""

    _goes_back = True

    def versions(self) -> list[int]:
        """All that are listed, ascending. Raises EmptyStream and StoreError."""
        found = self._serial.run(lambda: self._failover.versions()[1])
        if not found:
            raise EmptyStream(
                f"stream {self.stream.name!r}: {absence(self.stream.store, self.stream.name)}"
            )
        return found

    def last(self, fits: Callable[[Manifest], bool]) -> int | None:
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


class Checkout(Closing, NotCopyable):
    """A verified version of a stream in host memory, made by `pulse_rl.checkout`, that moves to
    others (`to`).

    It goes forward along patches and folds, and back from an anchor: then there is a second state
    until it arrives. With a ``cache`` each payload is downloaded once. Interrupts do no harm, and
    one thread uses it at a time, as for `Subscriber`. A context manager.
    """

    def __init__(self, reader: Any) -> None:
        self._reader: _Reader = reader
        self._listed: list[int] = []

    @property
    def version(self) -> int:
        """Its number."""
        return self.manifest.version

    @property
    def root(self) -> str:
        """The root of the state, 64 hexadecimal digits, which was computed from its bits and is the
        manifest's."""
        return self._reader.root

    @property
    def metadata(self) -> Metadata:
        """What the publisher says of the version."""
        return dict(self.manifest.metadata)

    @property
    def manifest(self) -> Manifest:
        """The version's manifest."""
        return self._reader.manifest

    @property
    def state(self) -> State:
        """Names to bits: read-only views, which the next `to` overwrites. Copy what you keep."""
        return self._reader.state

    def versions(self) -> list[int]:
        """The versions that the stream has now, ascending. Raises StoreError."""
        self._listed = self._reader.versions()
        return list(self._listed)

    def state_dict(self) -> dict[str, Any]:
        """The state as torch tensors in host memory of their own, under all of its names, for
        ``model.load_state_dict``. Raises UnsupportedTensor for a dtype that this torch lacks."""
        # By its name: this package is below the integrations, and is there without torch.
        tensors: dict[str, Any] = import_module("pulse_rl.frameworks.torch").to_torch(self.state)
        return tensors

    def files(self) -> dict[str, bytes]:
        """The files beside the weights, such as config and tokenizer, as `Subscriber.files`."""
        return self._reader.files()

    def save(
        self, path: str | os.PathLike[str], *, sharded: bool = False, force: bool = False
    ) -> None:
        """Writes ``path``: a folder that ``from_pretrained`` loads, with weights and `files`, or
        one ``.safetensors`` file. ``sharded`` and ``force`` are those of
        `Subscriber.save`."""
        self._reader.save(path, sharded=sharded, force=force)

    def to(
        self,
        version: int | None = None,
        *,
        root: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Self:
        """Moves to another version, and returns this object: to ``version``, or to the newest one
        with this ``root`` or with all that ``metadata`` says, as for `pulse_rl.checkout`; without
        any to the newest.

        It takes the cheapest path of patches and folds from where it is, or from an anchor, which
        is the only way back. Raises what `Subscriber.sync` raises, and InputError for a version
        that does not exist; it then stays where it is.
        """
        target = self._found(version, root, metadata)
        if target is not None and target not in self._listed and target not in self.versions():
            name, (first, *_, last) = self._reader.stream.name, [self._listed[0], *self._listed]
            raise InputError(
                f"stream {name!r} has no version {target}: it has {first} to {last}",
                hint="`pulse log` shows them.",
            )
        self._reader.sync(target)
        if self._reader.version is None:
            self._reader.versions()  # raises why there is none
        return self

    def close(self) -> None:
        """Lets the state go, and all that is kept. May be called twice."""
        self._reader.close()

    def __repr__(self) -> str:
        return f"<Checkout of version {self._reader.version} of {self._reader.stream.name!r}>"

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
            found, said = (
                self._reader.last(lambda manifest: manifest.root.startswith(root)),
                f"the root {root}",
            )
        elif metadata is not None:
            facts = checked_metadata(metadata).items()
            found = self._reader.last(lambda manifest: facts <= manifest.metadata.items())
            said = " ".join(f"{key}={value}" for key, value in facts)
        else:
            return version
        if found is None:
            hint = "`pulse log` shows what the versions have."
            raise InputError(f"no version of {self._reader.stream.name!r} has {said}", hint=hint)
        return found


def checkout(
    store: Store | str,
    stream: str,
    *,
    version: int | None = None,
    root: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | None = None,
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
    threads: int | None = None,
    on_event: Listener | None = None,
) -> Checkout:
    """Return any version of a stream, verified: the exact bits of a policy.

    Args:
        store: The store or its address, or several, nearest first.
        stream: The stream's name.
        version: Its number.
        root: The newest version with this root: 64 hexadecimal digits, or the first 8 or more.
        metadata: The newest version with all of this metadata, such as ``{"step": 400}``. Without a
            ``version``, ``root`` or ``metadata``: the newest version.
        cache: As for `Subscriber`; so are ``trusted_keys``, ``stream_id``, ``threads`` and
            ``on_event``.
    Raises:
        InputError: There is no such version.
        EmptyStream: There is no version at all.

    It also raises what `Subscriber` and its ``sync`` raise.

    ::

        with pulse_rl.checkout("s3://bucket/run", "policy", metadata={"step": 400}) as found:
            model.load_state_dict(found.state_dict())
            found.to(found.version - 1).save("policy-before")
    """
    reader = _Reader(
        store,
        stream=stream,
        cache=cache,
        trusted_keys=trusted_keys,
        stream_id=stream_id,
        threads=threads,
        on_event=on_event,
    )
    return Checkout(reader).to(version, root=root, metadata=metadata)
