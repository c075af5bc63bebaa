"""Stores hold streams: six calls on named immutable objects, behind one address.

To add a backend, write a class that implements `base.Store` and passes
`pulse_rl.testing.StoreConformance` (tests/store/test_conformance.py), and add its scheme to
`open_store`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from .._util.addresses import check_address, shown
from .._util.retry import BRIEF_SECONDS, RETRY_SECONDS
from ..errors import InputError
from .base import Data, ObjectInfo, Store
from .local import LocalStore

__all__ = [
    "Data",
    "LocalStore",
    "ObjectInfo",
    "Store",
    "open_store",
]

_ONE_SLASH = re.compile(r"(file|memory|https?|hf|s3a?|gs|az|abfss?):/?(?!/)")
_OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")


def open_stores(given: Store | str | Sequence[Store | str]) -> list[Store]:
    """Open the stores of a reader: one, or several in order of preference, of which each retries
    for a short time only. Raises as `open_store`."""
    addresses: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    if not addresses:
        raise InputError(
            "no store was given", hint="Give a store, or several in order of preference."
        )
    options = {"retry_timeout": BRIEF_SECONDS} if len(addresses) > 1 else {}
    return [open_store(each, **options) for each in addresses]


def open_store(address: str | os.PathLike[str] | Store, **options: Any) -> Store:
    """Open the store at an address.

    Args:
        address: A folder's path or ``file:///folder``; ``memory://``, new and empty each time;
            ``s3://bucket/prefix``, ``gs://…`` or ``az://…``;
            ``hf://buckets/namespace/bucket/prefix``, which is S3. For readers also
            ``http://host:port``, ``https://…`` or ``hf://namespace/repository/prefix``. A `Store`
            is returned unchanged.
        options: ``retry_timeout``, for how long a call is repeated that fails in a way that may
            pass, in seconds (180); and those of the backend: obstore's for object stores, those of
            ``HttpStore`` for HTTP. Default: none.
    Returns: The store.
    Raises:
        InputError: ``address`` is not a store address.
        StoreError: The store cannot be opened.
    """
    if isinstance(address, Store):
        return address
    if not isinstance(address, str | os.PathLike) or not isinstance(
        text := os.fspath(address), str
    ):
        raise InputError(f"{type(address).__name__} is not a store address")
    # 1. One slash ("s3:/bucket") would silently become a local folder of that name.
    if not text or "\0" in text or _ONE_SLASH.match(text):
        raise InputError(
            f"{shown(text)!r} is not a store address",
            hint="Write a path, or scheme://bucket/prefix.",
        )
    # 2. A folder.
    patience = options.get("retry_timeout", RETRY_SECONDS)
    if "://" not in text:
        return LocalStore(Path(text).expanduser().absolute(), retry_timeout=patience)
    check_address(text)
    try:
        url = urlparse(text)
    except ValueError as error:
        raise InputError(f"{shown(text)} is not a valid address: {error}") from None
    if url.scheme == "file":
        if url.netloc not in ("", "localhost") or not url.path:
            raise InputError(
                f"{shown(text)} names a host", hint="Write three slashes: file:///absolute/path."
            )
        return LocalStore(Path(unquote(url.path)), retry_timeout=patience)
    # 3. Every other backend is imported on demand: the core works without them.
    if url.scheme == "memory":
        from ..stores.memory import MemoryStore

        return MemoryStore()
    if url.scheme in _OBJECT_SCHEMES:
        from ..stores.object import ObjectStore

        return ObjectStore(text, **options)
    if url.scheme == "hf":
        from ..stores.hub import HubStore, bucket_address
        from ..stores.object import ObjectStore

        if url.netloc == "buckets":
            return ObjectStore(bucket_address(text), **options)
        return HubStore(text, **options)
    if url.scheme in ("http", "https"):
        from ..stores.http import HttpStore

        return HttpStore(text, **options)
    raise InputError(
        f"{shown(text)} is not a store address",
        hint="Use a folder's path, file://, memory://, http://, hf://, s3://, gs:// or az://.",
    )
