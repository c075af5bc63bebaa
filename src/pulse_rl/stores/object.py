"""Object stores (S3 and compatible, Google Cloud Storage, Azure) through obstore, and what is wrong
with their set-up (docs/stores.md)."""

from __future__ import annotations

import configparser
import os
import re
from _thread import start_new_thread
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore import exceptions as ob

from .._util.addresses import check_address, shown, shown_text
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

_PAGE = 1000
# Until a store has answered once it is more likely to be misconfigured than busy. Later, obstore's
# own: minutes.
_FIRST_LIMITS: dict[str, Any] = {
    "retry_config": {"max_retries": 10, "retry_timeout": timedelta(seconds=4)}
}
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
        options: Settings of obstore (``endpoint``, ``region``, ``account_name`` …); for S3
            ``profile``, too.
    Raises:
        InputError: There is a secret in the address.
        StoreError: The store cannot be opened.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._address = url
        place, given = _parsed(url)
        options = given | options
        self._scheme, self._bucket = urlsplit(place).scheme, urlsplit(place).netloc
        if self._scheme in ("s3", "s3a"):
            options = _with_profile(options)
        self._endpoint = next(
            (str(options[k]) for k in ("endpoint", "endpoint_url") if options.get(k)), None
        )
        if self._endpoint is None and self._scheme in ("s3", "s3a"):
            self._endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
        if (self._endpoint or "").startswith("http://"):
            options["client_options"] = {"allow_http": True, **options.get("client_options", {})}
        try:
            self._store = self._lasting = obstore.store.from_url(place, **options)
            if "retry_config" not in options:
                limits = {**_FIRST_SECONDS, **options.get("client_options", {})}
                first = {**options, **_FIRST_LIMITS, "client_options": limits}
                self._store = obstore.store.from_url(place, **first)
        except (ob.BaseError, ValueError, TypeError) as error:
            raise self._explained(error, "open", "") from error

    def __repr__(self) -> str:
        return f"ObjectStore({self._address!r})"

    def put(self, name: str, data: Data) -> None:
        with self._translated("put", name):
            obstore.put(
                self._store, check_name(name), data if isinstance(data, bytes) else _begun(data)
            )

    def put_new(self, name: str, data: bytes) -> None:
        with self._translated("put", name):
            obstore.put(self._store, check_name(name), data, mode="create", use_multipart=False)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._translated("get", name):
            if start == 0 and stop is None:
                return bytes(obstore.get(self._store, check_name(name)).bytes())
            if stop is not None and 0 <= start < stop:
                # One request where all is well; what is wrong with a range is found out below.
                with suppress(ob.BaseError):
                    data = self._pieces(check_name(name), start, stop)
                    if len(data) == stop - start:
                        return data
            start, stop = check_range(name, self.head(name).nbytes, start, stop)
            if start == stop:
                return b""
            return bytes(obstore.get_range(self._store, name, start=start, end=stop))

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
        with self._translated("get", name):
            meta = obstore.head(self._store, check_name(name))
        return ObjectInfo(name, meta["size"], meta["last_modified"].timestamp())

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        with self._translated("list", folder):
            pages = obstore.list(
                self._store, check_folder(folder) or None, offset=start_after, chunk_size=_PAGE
            )
            previous, held = "", None
            for meta in chain(chain.from_iterable(pages), (None,)):
                # An empty object "folder/", which consoles and mounts make, loses its slash in
                # obstore: nothing of ours is empty and a folder, or out of order.
                if held and not (meta and meta["path"].startswith(f"{held.name}/")):
                    yield held
                held = None
                if meta is None:
                    return
                found = ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
                if found.nbytes == 0 and (found.name == folder or found.name <= previous):
                    continue
                # Most backends list in order; one that does not would break resuming at
                # start_after, so say it.
                if found.name <= previous:
                    raise StoreError(f"{self._address} does not list objects in name order")
                previous = found.name
                if found.nbytes == 0:
                    held = found
                else:
                    yield found

    def delete(self, name: str) -> None:
        with suppress(NotFound), self._translated("delete", name):
            obstore.delete(self._store, check_name(name))

    @contextmanager
    def _translated(self, call: str, name: str) -> Iterator[None]:
        global _used_by
        _used_by = _used_by or os.getpid()
        if _used_by != os.getpid():
            raise InputError(
                f"{self._address}: an object store was used before this process was forked",
                hint='Start the process by spawn: multiprocessing.get_context("spawn").',
            )
        try:
            yield
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

    def _explained(self, error: BaseException, call: str, name: str) -> PulseError:
        """What an error of obstore means that ``call`` (open, put, get, list or delete) has raised,
        and what to do about it."""
        text, first = str(error), shown_text(_first_line(error))
        kind = _KINDS.get(self._scheme, "s3")
        words = {
            "bucket": self._bucket,
            "endpoint": shown(self._endpoint or "the default endpoint"),
            "call": call,
            "first": first,
            "sought": _SOUGHT[kind],
            "give": _GIVE[kind],
            "right": _RIGHTS[kind].get(call, "more rights"),
        }
        where = f"{self._address}: {name}".removesuffix(": ")
        missing = isinstance(error, ob.NotFoundError | FileNotFoundError)
        for pattern, what, hint in _REASONS[:1] if missing else _REASONS:
            if re.search(pattern, text):
                return StoreError(f"{where}: {what.format(**words)}", hint=hint.format(**words))
        if missing:
            return NotFound(f"{name} is not in the store {self._address}")
        if isinstance(error, ob.NotSupportedError | ob.InvalidPathError | ValueError | TypeError):
            return StoreError(f"{where}: {first}")
        for pattern, what, hint in _AWAY:
            if re.search(pattern, text):
                reason = f"{where}: {what.format(**words)}"
                return StoreUnavailable(reason, hint=hint.format(**words))
        away = StoreError if call == "open" else StoreUnavailable
        return away(f"{where}: {first}")


def _parsed(url: str) -> tuple[str, dict[str, str]]:
    """The address without its settings, and these. Raises InputError for secrets among them."""
    check_address(url)
    place, _, query = url.partition("?")
    return place, dict(parse_qsl(query, keep_blank_values=True))


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
    if (
        "endpoint_url" in profile
        and "AWS_ENDPOINT_URL" not in os.environ
        and "endpoint" not in options
    ):
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


# -- what errors mean


_KINDS = {"gs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_SOUGHT = {
    "s3": "in the arguments, AWS_ACCESS_KEY_ID, a profile of ~/.aws, a web identity, or the role "
    "of this container or "
    "machine",
    "gcs": "in the arguments, GOOGLE_APPLICATION_CREDENTIALS, the log-in of gcloud, or the "
    "account of this machine",
    "azure": "in the arguments, AZURE_STORAGE_ACCOUNT_KEY, AZURE_CLIENT_ID, or the identity of "
    "this machine",
}
_GIVE = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; skip_signature=true "
    "reads public buckets.",
    "gcs": "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth "
    "application-default login`.",
    "azure": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_CLIENT_ID "
    "and its secret.",
}
_RIGHTS = {
    "s3": {
        "put": "s3:PutObject",
        "get": "s3:GetObject",
        "list": "s3:ListBucket",
        "delete": "s3:DeleteObject",
    },
    "gcs": {
        "put": "storage.objects.create and storage.objects.delete",
        "get": "storage.objects.get",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
    "azure": dict.fromkeys(
        ("put", "get", "list", "delete"), "the role Storage Blob Data Contributor"
    ),
}
_REASONS: tuple[tuple[str, str, str], ...] = (
    # A pattern in obstore's message, what it means, and what to do. The first that is found counts.
    (
        "NoSuchBucket|ContainerNotFound|specified bucket does not exist|container does not exist",
        "there is no bucket {bucket!r} at {endpoint}",
        "Create it, or check the address: scheme://BUCKET/PREFIX.",
    ),
    (
        r"169\.254\.169\.254|metadata\.google\.internal|169\.254\.170\.2|NoSuchCredential",
        "no credentials were found {sought}",
        "{give}",
    ),
    (
        "Account must be specified",
        "no storage account was given",
        "Add ?account_name=ACCOUNT to the address.",
    ),
    (
        "InvalidAccessKeyId",
        "the access key is not one that {endpoint} knows",
        "Check the key and the endpoint.",
    ),
    (
        "SignatureDoesNotMatch",
        "the secret key is not that of the access key",
        "Check AWS_SECRET_ACCESS_KEY.",
    ),
    (
        "ExpiredToken|TokenRefreshRequired",
        "the credentials have expired",
        "Renew them, as by `aws sso login`.",
    ),
    ("InvalidToken|AuthenticationFailed", "the credentials are not valid", "{give}"),
    (
        "RequestTimeTooSkewed",
        "this machine's clock is wrong",
        "Set the clock: requests are signed with the time.",
    ),
    (
        "incorrectly configured "
        "region|AuthorizationHeaderMalformed|PermanentRedirect|IllegalLocationConstraint",
        "the bucket is in another region",
        "Add ?region=REGION to the address, or set AWS_REGION.",
    ),
    (
        "builder error",
        "the endpoint {endpoint} is not https://, and plain http was not allowed",
        'Give client_options={{"allow_http": True}}, or set AWS_ALLOW_HTTP=true.',
    ),
    (
        "403 Forbidden|401 Unauthorized|necessary privileges|valid authentication",
        "not allowed to {call}",
        "The credentials need {right} there: docs/stores.md.",
    ),
    (
        "not valid for store|UnknownConfigurationKey",
        "the address or the arguments have a setting that there is not: {first}",
        "Write it like s3://bucket/run?endpoint=http://minio:9000&region=us-east-1.",
    ),
    (
        "Unable to recognise URL|Unrecogni[sz]ed",
        "this is not the address of a bucket",
        "Write scheme://BUCKET/PREFIX.",
    ),
    (
        "ETag Header missing|Got invalid|Error deserializing|405 Method Not "
        "Allowed|MethodNotAllowed",
        "what answers at {endpoint} is no such object store: {first}",
        "Check the endpoint's host and port; a web console often has another port.",
    ),
    (
        "501 Not Implemented|NotImplemented",
        "{endpoint} cannot {call} in this way: {first}",
        "Run `pulse store-check`: creating an object only if it is not there has to work.",
    ),
    (
        "InvalidContentType|corrupt message",
        "{endpoint} does not speak https",
        "Write http:// in the endpoint, or another port.",
    ),
    (
        "invalid peer certificate|UnknownIssuer",
        "the certificate of {endpoint} is not trusted here",
        "Install its authority on this machine; for a try, give "
        'client_options={{"allow_invalid_certificates": True}}.',
    ),
)
_AWAY = (
    (
        "dns error|failed to lookup",
        "the host of {endpoint} is not known",
        "Check the endpoint's name and the network.",
    ),
    (
        "Connection refused|ConnectionRefused",
        "nothing answers at {endpoint}",
        "Is it running? Check the host and port.",
    ),
    (
        "TimedOut|operation timed out|timed out",
        "{endpoint} does not answer in time",
        "Check the endpoint's host and port, and proxies.",
    ),
)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
