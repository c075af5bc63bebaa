"""Manifests in memory, bounded in number and in bytes."""

from __future__ import annotations

import threading

from .manifest import Manifest, with_aliases

# Above the length of a stream that is kept in order, so that looking for a way around a gap reads each manifest once.
_MOST = 1 << 14
_MOST_BYTES = 32 << 20


class ManifestCache:
    """The manifests read last. Aliases equal to those of the manifest before are held once: a model with hundreds of
    tied names has the same ones in each version. May be used from several threads."""

    def __init__(self, most: int = _MOST, most_bytes: int = _MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: dict[int, tuple[Manifest, int]] = {}
        self._nbytes = 0
        self._aliases: dict[str, str] = {}
        self._lock = threading.Lock()

    def get(self, version: int) -> Manifest | None:
        kept = self._kept.get(version)
        return kept[0] if kept else None

    def keep(self, manifest: Manifest) -> None:
        """Keeps ``manifest`` in place of the oldest where there is no more room, and by itself however large it is."""
        with self._lock:
            if manifest.version in self._kept:
                return
            if list(manifest.aliases.items()) == list(self._aliases.items()):
                nbytes = len(with_aliases(manifest, {}).to_bytes())
                manifest = with_aliases(manifest, self._aliases)
            else:
                nbytes = len(manifest.to_bytes())
                self._aliases = manifest.aliases
            while self._kept and (len(self._kept) >= self._most or self._nbytes + nbytes > self._most_bytes):
                self._nbytes -= self._kept.pop(next(iter(self._kept)))[1]
            self._kept[manifest.version] = manifest, nbytes
            self._nbytes += nbytes
