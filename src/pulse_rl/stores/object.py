"""Object stores (S3 and compatible, Google Cloud Storage, Azure) through obstore, and what is wrong
with their set-up (docs/stores.md)."""

from __future__ import annotations

import configparser
import os
import re
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore import exceptions as ob

from .._util.addresses import check_address, shown
from .._util.retry import RETRY_SECONDS, Patience
from .._util.threads import Call, ordered_map
from ..errors import AlreadyExists, InputError, NotFound, PulseError, StoreError, StoreUnavailable
from ..store.base import (
    CONNECTIONS,
    PIECE_BYTES,
    Data,
    ObjectInfo,
    check_folder,
    check_name,
    check_range,
)
from .object_errors import Place, explained, needs_new_keys

T = TypeVar("T")
_PAGE = 1000
_FOREIGN_KEY = "foreign key"
# Of obstore, within one of our own tries. Until a store has answered once it is more likely to be
# misconfigured than busy.
# Its own longest wait is 15 s: a store that is back would be noticed as late.
_BACKOFF = {
    "init_backoff": timedelta(seconds=0.1),
    "max_backoff": timedelta(seconds=4),
    "base": 2,
}
_LIMITS: dict[str, Any] = {
    "max_retries": 10,
    "retry_timeout": timedelta(seconds=30),
    "backoff": _BACKOFF,
}
_FIRST_LIMITS: dict[str, Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=4)}
_FIRST_SECONDS = {"connect_timeout": "3s", "timeout": "8s"}
# The process that made the first request. obstore's threads, which all stores share, are not in its
# forked children, where a request would wait for ever.
_used_by: int | None = None


def _begun(chunks: Iterable[bytes | memoryview]) -> bytes | Iterator[bytes]:
    """All of the chunks, where together they are small: an upload in parts takes two requests more
    than one at once."""
    begin, made = bytearray(), _made_aside(chunks)
    for chunk in made:
        begin += chunk
        if len(begin) > PIECE_BYTES:
            return chain((bytes(begin),), made)
    return bytes(begin)


def _made_aside(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """The chunks, each made in a thread of its own: a relay reads them from an object store, and
    obstore panics where it is asked to read within a write."""
    made = iter(chunks)
    while True:
        call = Call(partial(next, made, None))
        start_new_thread(call.run, ())
        try:
            call.wait()
        finally:
            call.settle()
        chunk = call.result()
        if chunk is None:
            return
        yield bytes(chunk)


class ObjectStore:
    """A `Store` in an object store: S3 and compatible ones, Google Cloud Storage, Azure.

    Settings that are not given come from the environment and, for S3, from the files of the AWS
    command line (docs/stores.md). An endpoint with ``http://`` is used as it is.

    Args:
        url: ``s3://bucket/prefix``, ``gs://…`` or ``az://…``, with settings but for secrets, such
            as ``s3://bucket/run?endpoint=http://minio:9000&region=us-east-1``.
        retry_timeout: For how long a call is repeated that fails in a way that may pass, in
            seconds; 5 at most until the store has answered once. A stream of chunks that can be
            read once only is sent once. Default: 180.
        options: Settings of obstore (``endpoint``, ``region``, ``account_name`` …); for S3
            ``profile``, too.
    Raises:
        InputError: There is a secret in the address, or a setting is empty or malformed.
        StoreError: The store cannot be opened.
    """

    def __init__(self, url: str, *, retry_timeout: float = RETRY_SECONDS, **options: Any) -> None:
        self._address = url
        self._patience = Patience(shown(url), retry_timeout)
        self._url, given = _parsed(url)
        self._given = given | options
        self._scheme, self._bucket = urlsplit(self._url).scheme, urlsplit(self._url).netloc
        self._options: dict[str, Any] | None = None
        self._open()

    def _open(self) -> bool:
        """Open the store with the settings that there are now; False if they are those that it has
        already."""
        options = dict(self._given)
        if self._scheme in ("s3", "s3a"):
            options = _from_environment(_with_profile(options))
        options = _checked_settings(options)
        if options == self._options:
            return False
        self._options = options
        self._endpoint = options.get("endpoint") or options.get("endpoint_url")
        if (self._endpoint or "").startswith("http://"):
            options = options | {
                "client_options": {"allow_http": True, **options.get("client_options", {})}
            }
        lasting = {"retry_config": _LIMITS} | options
        limits = {**_FIRST_SECONDS, **options.get("client_options", {})}
        first = {"retry_config": _FIRST_LIMITS} | options | {"client_options": limits}
        try:
            self._lasting = obstore.store.from_url(self._url, **lasting)
            self._store = obstore.store.from_url(self._url, **first)
        except (ob.BaseError, ValueError, TypeError) as error:
            raise self._explained(error, "open", "") from error
        return True

    def __repr__(self) -> str:
        return f"ObjectStore({self._address!r})"

    def put(self, name: str, data: Data) -> None:
        check_name(name)

        def put() -> None:
            try:
                obstore.put(self._store, name, data if isinstance(data, bytes) else _begun(data))
            except ob.AlreadyExistsError as error:  # obstore's word for every 409
                raise StoreUnavailable(
                    f"{self._address}: {name} is being written by another request"
                ) from error

        self._call("put", name, put, once=isinstance(data, Iterator))

    def put_new(self, name: str, data: bytes) -> None:
        check_name(name)

        def create() -> None:
            try:
                obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except ob.AlreadyExistsError as error:
                # S3 says 409, too, where another request for the name is under way and may fail.
                try:
                    obstore.head(self._store, name)
                except (ob.NotFoundError, FileNotFoundError):
                    raise StoreUnavailable(
                        f"{self._address}: {name} is being created by another request"
                    ) from error
                raise

        self._call("put", name, create)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        check_name(name)

        def get() -> bytes:
            if start == 0 and stop is None:
                return bytes(obstore.get(self._store, name).bytes())
            if stop is not None and 0 <= start < stop:
                # One request where all is well; what is wrong with a range is found out below.
                with suppress(ob.BaseError):
                    data = self._pieces(name, start, stop)
                    if len(data) == stop - start:
                        return data
            size = int(self._meta(name)["size"])
            first, last = check_range(name, size, start, stop)
            if first == last:
                return b""
            if (first, last) == (0, size):  # some proxies answer a range with the whole object
                return bytes(obstore.get(self._store, name).bytes())
            return bytes(obstore.get_range(self._store, name, start=first, end=last))

        return self._call("get", name, get)

    def _meta(self, name: str) -> Any:
        """What the store says of an object. An answer to HEAD has no body: where it refuses, the
        reason is asked for by reading a byte."""
        try:
            return obstore.head(self._store, name)
        except (ob.NotFoundError, FileNotFoundError):
            raise
        except ob.BaseError as error:
            if re.search(r"\b40[03]\b", str(error)):
                obstore.get_range(self._store, name, start=0, end=1)
            raise

    def _pieces(self, name: str, start: int, stop: int) -> bytes:
        """The range, over as many connections as its length is worth."""
        count = min((stop - start) // PIECE_BYTES, CONNECTIONS)
        if count < 2:
            return bytes(obstore.get_range(self._store, name, start=start, end=stop))
        cuts = [start + (stop - start) * k // count for k in range(count + 1)]
        found = ordered_map(
            lambda cut: obstore.get_range(self._store, name, start=cut[0], end=cut[1]),
            pairwise(cuts),
            count,
        )
        return b"".join(found)

    def head(self, name: str) -> ObjectInfo:
        check_name(name)
        meta = self._call("get", name, lambda: self._meta(name))
        return ObjectInfo(name, meta["size"], meta["last_modified"].timestamp())

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        check_folder(folder)
        previous, held = "", None
        for meta in chain(self._metas(folder, start_after), (None,)):
            # An empty object "folder/", which consoles and mounts make, loses its slash in obstore:
            # nothing of ours is empty and a folder, or out of order.
            if held and not (meta and meta["path"].startswith(f"{held.name}/")):
                yield held
            held = None
            if meta is None:
                return
            found = ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
            if found.nbytes == 0 and (found.name == folder or found.name <= previous):
                continue
            # Most backends list in order; one that does not would break resuming at start_after, so
            # say it.
            if found.name <= previous:
                raise StoreError(f"{self._address} does not list objects in name order")
            previous = found.name
            if found.nbytes == 0:
                held = found
            else:
                yield found

    def _metas(self, folder: str, start_after: str | None) -> Iterator[Any]:
        """What the store says of the objects below a folder, page by page. A listing that breaks
        begins again after its last page.

        obstore refuses a page with a key that has an empty part, "." or "..": somebody else's.
        Such keys in the folder itself sort before ours, which begin with a letter or a digit, so
        the listing begins again behind them. For those that lie deeper each folder is listed alone.
        """
        after, pages = start_after, None
        behind = f"{folder}/0".lstrip("/")

        def next_page() -> Any:
            nonlocal pages
            begun, pages = pages, None
            if begun is None:
                begun = iter(
                    obstore.list(self._store, folder or None, offset=after, chunk_size=_PAGE)
                )
            try:
                page = next(begun, None)
            except ob.InvalidPathError:
                return _FOREIGN_KEY
            pages = begun
            return page

        def one_level() -> Any:
            try:
                return obstore.list_with_delimiter(self._store, folder or None)
            except ob.InvalidPathError as error:
                said = str(error).partition("\n")[0]
                raise StoreError(
                    f"{self._address} has an object that is none of Pulse's: {said}",
                    hint="Delete that object.",
                ) from None

        while page := self._call("list", folder, next_page):
            if page != _FOREIGN_KEY:
                after = page[-1]["path"]
                yield from page
            elif after is None or after < behind:
                after = behind
            else:
                found = self._call("list", folder, one_level)
                level = [*found["common_prefixes"], *(meta["path"] for meta in found["objects"])]
                metas = {meta["path"]: meta for meta in found["objects"]}
                for name in sorted(level, key=lambda name: name if name in metas else f"{name}/"):
                    if name not in metas:
                        yield from self._metas(name, after)
                    elif name > after:
                        yield metas[name]
                return

    def delete(self, name: str) -> None:
        check_name(name)
        with suppress(NotFound):
            self._call("delete", name, lambda: obstore.delete(self._store, name))

    def _call(self, call: str, name: str, work: Callable[[], T], *, once: bool = False) -> T:
        """The result of ``work``, repeated while it fails in a way that may pass, but for what can
        be done ``once``; and with new credentials, where those in the files of AWS have changed."""

        def tried() -> T:
            global _used_by
            _used_by = _used_by or os.getpid()
            if _used_by != os.getpid():
                raise InputError(
                    f"{self._address}: an object store was used before this process was forked",
                    hint='Start the process by spawn: multiprocessing.get_context("spawn").',
                )
            try:
                done = work()
            except (ob.AlreadyExistsError, ob.PreconditionError):
                self._store = self._lasting
                raise AlreadyExists(f"{self._address}: {name} already exists") from None
            except (ob.BaseError, OSError) as error:
                found = self._explained(error, call, name)
                if isinstance(found, NotFound):
                    self._store = self._lasting
                    raise found from None
                raise found from error
            self._store = self._lasting
            return done

        try:
            return tried() if once else self._patience(tried)
        except StoreError as error:
            if once or not isinstance(error.__cause__, ob.BaseError) or not needs_new_keys(error):
                raise
            if not self._open():
                raise
            return self._patience(tried)

    def _explained(self, error: BaseException, call: str, name: str) -> PulseError:
        place = Place(self._address, self._scheme, self._bucket, self._endpoint)
        return explained(error, call, name, place)


def _parsed(url: str) -> tuple[str, dict[str, str]]:
    """The address without its settings, and these. Raises InputError for secrets among them."""
    check_address(url)
    place, _, query = url.partition("?")
    return place, dict(parse_qsl(query, keep_blank_values=True))


_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def _from_environment(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the endpoint of the environment, which may be one for S3 alone, and with its
    keys where these have white space at an end. Raises InputError for one that is empty."""
    if not {"endpoint", "endpoint_url"} & options.keys():
        named = next((name for name in _ENDPOINTS if name in os.environ), None)
        if named is not None:
            options = options | {"endpoint": _set(named)}
    for name in _VARIABLES:
        key = name.removeprefix("AWS_").lower()
        given = os.environ.get(name)
        if given and given != given.strip() and key not in options:
            options = options | {key: _set(name)}
    return options


def _set(variable: str) -> str:
    value = os.environ[variable].strip()
    if not value:
        raise InputError(f"{variable} is set, and empty", hint="Unset it, or give it a value.")
    return value


def _checked_settings(options: dict[str, Any]) -> dict[str, Any]:
    """The options without white space at their ends, as from a file of a secret. Raises InputError
    for those with which obstore would panic."""
    checked = {k: v.strip() if isinstance(v, str) else v for k, v in options.items()}
    for key, value in checked.items():
        if isinstance(value, str) and not value.isprintable():
            raise InputError(f"the setting {key!r} has a control character", hint="Remove it.")
    for key in {"endpoint", "endpoint_url"} & checked.keys():
        value = checked[key]
        if not re.match("https?://[^/]", str(value)):
            raise InputError(
                f"the endpoint {shown(str(value))!r} has no scheme",
                hint=f"Write http:// or https:// before it: https://{shown(str(value))}",
            )
    return checked


# -- the files of the AWS command line

_NEEDS_HELP = (
    "sso_session",
    "sso_start_url",
    "role_arn",
    "credential_process",
    "web_identity_token_file",
)
_EXPORT = 'eval "$(aws configure export-credentials --profile {} --format env)"'


def _with_profile(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the keys, region and endpoint of an AWS profile, of which obstore knows
    nothing. Keys that are given, or in the environment where no profile is named here, count first.
    Raises StoreError."""
    options = dict(options)
    named: str | None = options.pop("profile", None)
    own = any(
        key in options
        for key in ("access_key_id", "aws_access_key_id", "credential_provider", "skip_signature")
    )
    if own or (named is None and "AWS_ACCESS_KEY_ID" in os.environ):
        return options
    name = (
        named or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    )
    files = {
        "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
        "AWS_CONFIG_FILE": "~/.aws/config",
    }
    paths = [
        Path(os.environ.get(variable, usual)).expanduser() for variable, usual in files.items()
    ]
    credentials, config = map(_sections, paths)
    profile = {**config.get(f"profile {name}", config.get(name, {})), **credentials.get(name, {})}
    if not profile and (named or name != "default"):
        there = sorted({*credentials, *(section.removeprefix("profile ") for section in config)})
        raise StoreError(
            f"there is no AWS profile {name!r} in {paths[0]} or {paths[1]}",
            hint=f"There are: {', '.join(there)}."
            if there
            else "Run `aws configure`, or set AWS_ACCESS_KEY_ID.",
        )
    if "aws_access_key_id" in profile:
        options["access_key_id"] = profile["aws_access_key_id"]
        options["secret_access_key"] = profile.get("aws_secret_access_key", "")
        if "aws_session_token" in profile:
            options["session_token"] = profile["aws_session_token"]
    elif any(key in profile for key in _NEEDS_HELP):
        options["credential_provider"] = _from_boto3(name)
    if "region" in profile and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys():
        options.setdefault("region", profile["region"])
    has_endpoint = "AWS_ENDPOINT_URL" in os.environ or "endpoint" in options
    if "endpoint_url" in profile and not has_endpoint:
        options["endpoint"] = profile["endpoint_url"]
    return options


def _sections(file: Path) -> Mapping[str, Mapping[str, str]]:
    parser = configparser.ConfigParser(interpolation=None, default_section="", strict=False)
    try:
        parser.read(file, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        raise StoreError(
            f"cannot read {file}: {' '.join(str(error).split())}", hint="Mend the file."
        ) from None
    return {name: dict(section) for name, section in parser.items()}


def _from_boto3(profile: str) -> Any:
    """Credentials that expire (SSO, roles, processes), renewed by boto3."""
    try:
        import boto3  # type: ignore[import-untyped, unused-ignore]
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider(boto3.Session(profile_name=profile))
    except ImportError:
        raise StoreError(
            f"the AWS profile {profile!r} has no keys of its own (SSO, a role or a process)",
            hint=f"Install boto3 (pip install boto3), or run {_EXPORT.format(profile)}.",
        ) from None
    except Exception as error:  # whatever boto3 makes of it
        reason = " ".join(str(error).split())
        raise StoreError(
            f"the AWS profile {profile!r} gives no credentials: {reason}",
            hint=f"Run `aws sso login --profile {profile}`.",
        ) from error
