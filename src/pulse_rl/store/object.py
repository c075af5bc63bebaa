"""Object stores (S3 and compatible, Google Cloud Storage, Azure) through obstore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import obstore
from obstore import exceptions as ob

from ..errors import AlreadyExists, NotFound, StoreError, StoreUnavailable
from .base import Data, ObjectInfo, check_folder, check_name, check_range

_PAGE = 1000


class ObjectStore:
    """A `Store` in an object store. ``url`` gives the bucket and prefix. Credentials and endpoints come from the
    environment as obstore reads them (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS …) or from
    obstore ``options``.
    """

    def __init__(self, url: str, **options: Any) -> None:
        try:
            self._store = obstore.store.from_url(url, **options)
        except (ob.BaseError, ValueError) as error:
            raise StoreError(f"cannot open {url}: {_first_line(error)}") from error
        self._url = url

    def __repr__(self) -> str:
        return f"ObjectStore({self._url!r})"

    def put(self, name: str, data: Data) -> None:
        with self._translated(name):
            obstore.put(self._store, check_name(name), data if isinstance(data, bytes) else map(bytes, data))

    def put_new(self, name: str, data: bytes) -> None:
        with self._translated(name):
            obstore.put(self._store, check_name(name), data, mode="create", use_multipart=False)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._translated(name):
            if start == 0 and stop is None:
                return bytes(obstore.get(self._store, check_name(name)).bytes())
            if stop is not None and 0 <= start < stop:
                # One request where all is well; what is wrong with a range is found out below.
                with suppress(ob.BaseError):
                    data = bytes(obstore.get_range(self._store, check_name(name), start=start, end=stop))
                    if len(data) == stop - start:
                        return data
            start, stop = check_range(name, self.head(name).nbytes, start, stop)
            if start == stop:
                return b""
            return bytes(obstore.get_range(self._store, name, start=start, end=stop))

    def head(self, name: str) -> ObjectInfo:
        with self._translated(name):
            meta = obstore.head(self._store, check_name(name))
        return ObjectInfo(name, meta["size"], meta["last_modified"].timestamp())

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        with self._translated(folder):
            pages = obstore.list(self._store, check_folder(folder) or None, offset=start_after, chunk_size=_PAGE)
            previous = ""
            for page in pages:
                for meta in page:
                    # Most backends list in order; one that does not would break resuming at start_after, so say it.
                    if meta["path"] <= previous:
                        raise StoreError(f"{self._url} does not list objects in name order")
                    previous = meta["path"]
                    yield ObjectInfo(previous, meta["size"], meta["last_modified"].timestamp())

    def delete(self, name: str) -> None:
        try:
            with self._translated(name):
                obstore.delete(self._store, check_name(name))
        except NotFound:
            pass

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        where = f"{self._url}: {name}"
        try:
            yield
        except (ob.NotFoundError, FileNotFoundError):
            raise NotFound(f"{name} is not in the store {self._url}") from None
        except (ob.AlreadyExistsError, ob.PreconditionError):
            raise AlreadyExists(f"{where} already exists") from None
        except (ob.PermissionDeniedError, ob.UnauthenticatedError) as error:
            raise StoreError(f"{where}: access denied: {_first_line(error)}") from error
        except (ob.NotSupportedError, ob.InvalidPathError, ob.UnknownConfigurationKeyError) as error:
            raise StoreError(f"{where}: {_first_line(error)}") from error
        except (ob.BaseError, OSError) as error:
            raise StoreUnavailable(f"{where}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
