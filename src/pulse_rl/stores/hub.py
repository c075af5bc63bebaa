"""The read half of a store, from a repository of the Hugging Face Hub: a folder store that was
uploaded there.

Objects are read through resolve URLs, which answer ranged GETs by way of a redirect; the Hub's tree
API lists them. The endpoint is trusted no more than an HTTP server is (`http`).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import (
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    Request,
    build_opener,
)

from .._util.addresses import shown, shown_text
from .._util.retry import RETRY_SECONDS, Patience
from ..errors import InputError, NotFound, StoreError, StoreUnavailable
from ..store.base import (
    MAX_LISTED,
    ObjectInfo,
    ReadOnly,
    check_folder,
    check_name,
    check_range,
    is_name,
)
from .http import (
    LENGTH,
    LISTING_TIMEOUTS,
    MAX_WHOLE_BYTES,
    MAY_PASS,
    MIN_RATE,
    DeadlineSocket,
    checked_timeout,
)

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ADDRESS = re.compile(
    rf"hf://(?:(datasets|models)/)?({_PART}/{_PART})(?:@({_PART}))?((?:/{_PART})*)/?"
)
_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')
_PAGE_BYTES = 8 << 20


class _Bounded(HTTPConnection):
    """One whose every request has a deadline, and not only each of its packets."""

    def connect(self) -> None:
        super().connect()
        self._bounded = DeadlineSocket(self.sock)
        self._bounded.begin(self.timeout or 0.0, MIN_RATE)
        self.sock: Any = self._bounded

    def getresponse(self) -> HTTPResponse:
        answer = super().getresponse()
        self._bounded.expect(answer.length or 0)
        return answer


class _BoundedTls(_Bounded, HTTPSConnection):
    pass


class _Connections(HTTPHandler, HTTPSHandler):
    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_Bounded, req)

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_BoundedTls, req)


class _Redirects(HTTPRedirectHandler):
    """The Hub redirects to other hosts, which sign their URLs: these are not shown the token."""

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise URLError(f"it redirects to {newurl[:80]!r}")
        again = super().redirect_request(req, fp, code, msg, headers, newurl)
        if again is not None:
            again.method = req.get_method()  # urllib makes a GET of a HEAD
        if again is not None and not _is_of_one_host(newurl, req.full_url):
            again.remove_header("Authorization")
        return again


def _is_of_one_host(url: str, other: str) -> bool:
    return urlsplit(url)[:2] == urlsplit(other)[:2]


class HubStore(ReadOnly):
    """A `Store` for readers in a repository of the Hugging Face Hub.

    Writing calls raise StoreError: upload a folder that is a store. The Hub does not show when an
    object was written: `head` and `list` say 0.

    Args:
        address: ``hf://namespace/name/prefix``; ``hf://datasets/…`` for a repository of data sets;
            ``@revision`` behind the name for another revision than ``main``.
        token: An access token. Default: HF_TOKEN, or that of ``hf auth login``.
        endpoint: The Hub's address. Default: HF_ENDPOINT, or the Hub.
        timeout_seconds: Bounds each request, to its first byte, and then at 16 KiB/s; ten times as
            long, a whole listing.
        retry_timeout: For how long a request is repeated that fails in a way that may pass, in
            seconds; 5 at most until the Hub has answered once. Default: 180.
    Raises:
        InputError: ``address`` names no repository.
    """

    writers_hint = "Publish to a folder and upload that, or to hf://buckets/NAMESPACE/BUCKET."

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        endpoint: str | None = None,
        timeout_seconds: float = 30.0,
        retry_timeout: float = RETRY_SECONDS,
    ) -> None:
        match = _ADDRESS.fullmatch(address)
        if match is None or match[2].startswith(("buckets/", "spaces/")):
            raise InputError(
                f"{shown(address)!r} is no repository", hint="Write hf://NAMESPACE/NAME/PREFIX."
            )
        kind, repository, revision, prefix = match.groups()
        kind, revision = kind or "models", revision or "main"
        hub = (endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        if "@" in hub:
            raise InputError("the endpoint of a Hub has no user", hint="HF_TOKEN has the token.")
        self._timeout = checked_timeout(timeout_seconds)
        self._patience = Patience(shown(address), retry_timeout)
        self._address = address
        self._prefix = prefix.strip("/")
        plural = "" if kind == "models" else f"{kind}/"
        self._resolve = f"{hub}/{plural}{repository}/resolve/{revision}{prefix}/"
        self._tree = f"{hub}/api/{kind}/{repository}/tree/{revision}{prefix}/"
        self._token = token or _token()
        self._opener = build_opener(_Redirects(), _Connections())

    def __repr__(self) -> str:
        return f"HubStore({self._address!r})"

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._patience(lambda: self._get(name, start, stop))

    def _get(self, name: str, start: int, stop: int | None) -> bytes:
        url = self._resolve + check_name(name)
        if stop is None or not 0 <= start < stop:
            unbounded = stop is None
            start, stop = check_range(name, self.head(name).nbytes, start, stop)
            if unbounded and stop - start > MAX_WHOLE_BYTES:
                raise StoreError(f"{name} has more bytes than are read without saying how many")
        if start == stop:
            return b""
        with self._ask("GET", url, name, {"Range": f"bytes={start}-{stop - 1}"}) as answer:
            if answer.status == 200 and start and stop > MAX_WHOLE_BYTES:
                raise StoreError(f"{self._address} sends all of {name} in place of a part")
            data = self._read(answer, name, stop if answer.status == 200 else stop - start)
        data = data[start:stop] if answer.status == 200 else data
        if len(data) != stop - start:
            check_range(name, self.head(name).nbytes, start, stop)
            raise StoreUnavailable(
                f"{self._address} sent {len(data)} of {stop - start} bytes of {name}"
            )
        return data

    def head(self, name: str) -> ObjectInfo:
        with self._ask("HEAD", self._resolve + check_name(name), name) as answer:
            # Of a file in large-file storage the Hub says this, before it redirects to where the
            # file is.
            text = answer.headers.get("X-Linked-Size") or answer.headers.get("Content-Length") or ""
        if not LENGTH.fullmatch(text):
            raise StoreError(f"{self._address} does not say how long {name} is")
        return ObjectInfo(name, int(text), 0.0)

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        url: str | None = f"{self._tree}{check_folder(folder)}".rstrip("/") + "?recursive=true"
        found: list[ObjectInfo] = []
        given_up = time.monotonic() + LISTING_TIMEOUTS * self._timeout
        while url is not None:
            if time.monotonic() > given_up:
                raise StoreUnavailable(f"{self._address} takes too long to list {folder}")
            try:
                with self._ask("GET", url, folder) as answer:
                    following = _NEXT.search(answer.headers.get("Link", ""))
                    page, url = url, urljoin(url, following[1]) if following else None
                    entries = json.loads(self._read(answer, folder, _PAGE_BYTES))
                    if url is not None and (not entries or not _is_of_one_host(url, page)):
                        raise ValueError(f"its next page is {shown_text(url)[:80]}")
            except NotFound:
                if found:
                    raise StoreUnavailable(f"{self._address} changed while it was listed") from None
                return
            except (ValueError, RecursionError) as error:
                raise StoreError(
                    f"{self._address} does not list {folder or 'its objects'}: {error}"
                ) from None
            found += self._listed(entries)
            if len(found) > MAX_LISTED:
                raise StoreError(f"{self._address} lists more than {MAX_LISTED} objects")
        behind = [each for each in found if start_after is None or each.name > start_after]
        yield from sorted(behind)

    def _listed(self, entries: Any) -> Iterator[ObjectInfo]:
        before = f"{self._prefix}/" if self._prefix else ""
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and entry.get("type") == "file":
                path, size = entry.get("path"), entry.get("size")
                if not isinstance(path, str) or not is_name(name := path.removeprefix(before)):
                    continue
                if path.startswith(before) and type(size) is int and LENGTH.fullmatch(f"{size}"):
                    yield ObjectInfo(name, size, 0.0)

    def _ask(
        self, method: str, url: str, name: str, headers: dict[str, str] | None = None
    ) -> HTTPResponse:
        sent = {"User-Agent": "pulse-rl", "Accept-Encoding": "identity", **(headers or {})}
        if self._token:
            sent["Authorization"] = f"Bearer {self._token}"

        def ask() -> HTTPResponse:
            try:
                answer: HTTPResponse = self._opener.open(
                    Request(url, headers=sent, method=method), timeout=self._timeout
                )
                return answer
            except HTTPError as error:
                error.close()
                missing = error.headers.get("X-Error-Code")
                if missing in ("RepoNotFound", "RevisionNotFound"):
                    raise StoreError(
                        f"{self._address} is not there",
                        hint="Check its name and revision; HF_TOKEN for a private one.",
                    ) from None
                if error.code == 404:
                    raise NotFound(f"{name} is not in the store {self._address}") from None
                if error.code == 416:
                    raise StoreError(f"the range is outside {name}") from None
                if error.code in (401, 403):
                    raise StoreError(
                        f"not allowed to read {self._address}", hint="Set HF_TOKEN."
                    ) from None
                may_pass = error.code in MAY_PASS or error.code >= 500
                raise (StoreUnavailable if may_pass else StoreError)(
                    f"{self._address}: the Hub answers {error.code} to {name}"
                ) from None
            except (URLError, HTTPException, OSError, ValueError) as error:
                raise StoreUnavailable(f"{self._address}: {shown_text(str(error))}") from None

        return self._patience(ask)

    def _read(self, answer: HTTPResponse, name: str, most: int) -> bytes:
        try:
            return answer.read(most)
        except (HTTPException, OSError) as error:
            raise StoreUnavailable(f"{self._address}: {name} broke off: {error}") from None


def _token() -> str | None:
    if token := os.environ.get("HF_TOKEN"):
        return token
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    file = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    try:
        return file.expanduser().read_text().strip() or None
    except OSError:
        return None


def bucket_address(address: str) -> str:
    """``hf://buckets/namespace/bucket/prefix`` as the address of the Hub's S3 gateway, or of the
    ``endpoint`` among its settings, in which the namespace is a folder. Raises InputError."""
    place, _, query = address.partition("?")
    match = re.fullmatch(rf"hf://buckets/({_PART})/({_PART})((?:/{_PART})*)/?", place)
    if match is None:
        raise InputError(
            f"{shown(place)!r} is no bucket of the Hub",
            hint="Write hf://buckets/NAMESPACE/BUCKET/PREFIX.",
        )
    settings = dict(part.partition("=")[::2] for part in query.split("&") if part)
    endpoint = settings.pop("endpoint", "https://s3.hf.co").rstrip("/")
    settings = {"region": "us-east-1", **settings, "endpoint": f"{endpoint}/{match[1]}"}
    given = "&".join(f"{key}={value}" for key, value in settings.items())
    return f"s3://{match[2]}{match[3]}?{given}"
