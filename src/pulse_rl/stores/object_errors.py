"""What the errors of object stores mean, and what to do about each (docs/stores.md)."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from obstore import exceptions as ob

from .._util.addresses import shown, shown_text
from ..errors import NotFound, PulseError, StoreError, StoreFull, StoreUnavailable


class Place(NamedTuple):
    """A store's address, its scheme and bucket, and its endpoint; None: the provider's own."""

    address: str
    scheme: str
    bucket: str
    endpoint: str | None


def explained(error: BaseException, call: str, name: str, place: Place) -> PulseError:
    """The error that an error of obstore stands for, which ``call`` (open, put, get, list or
    delete) has raised. The server's own code and message come first."""
    text, first = str(error), shown_text(_reason(error))
    kind = _KINDS.get(place.scheme, "s3")
    words = {
        "bucket": place.bucket,
        "endpoint": shown(place.endpoint or "the default endpoint"),
        "call": call,
        "first": first,
        "sought": _SOUGHT[kind],
        "give": _GIVE[kind],
        "right": _RIGHTS[kind].get(call, "more rights"),
        "proxies": _proxies(),
    }
    where = f"{place.address}: {name}".removesuffix(": ")
    missing = isinstance(error, ob.NotFoundError | FileNotFoundError)
    # 1. A full bucket, whatever the status.
    if re.search(_FULL, text):
        return StoreFull(f"{where}: {first}", hint="Nothing was lost; raise the quota or delete.")
    # 2. What has a meaning of its own.
    for pattern, what, hint in _REASONS[:1] if missing else _REASONS:
        if re.search(pattern, text):
            return StoreError(f"{where}: {what.format(**words)}", hint=hint.format(**words))
    if missing:
        return NotFound(f"{name} is not in the store {place.address}")
    # 3. What may pass, and what will not.
    if isinstance(error, ob.NotSupportedError | ob.InvalidPathError | ValueError | TypeError):
        return StoreError(f"{where}: {first}")
    for pattern, what, hint in _AWAY:
        if re.search(pattern, text):
            reason = f"{where}: {what.format(**words)}"
            return StoreUnavailable(reason, hint=hint.format(**words))
    if call == "open" or (re.search(_REFUSED, text) and not re.search(_MAY_PASS, text)):
        return StoreError(f"{where}: {first}", hint="The store refuses this request for good.")
    return StoreUnavailable(f"{where}: {first}")


def needs_new_keys(error: PulseError) -> bool:
    """Whether other keys may be accepted: these have expired, or were deleted as keys are that are
    rotated."""
    return re.search(_REPLACED, str(error.__cause__)) is not None


def _reason(error: BaseException) -> str:
    """The server's code and message, where it gave some; else the first line of the error, without
    the request and its duration."""
    text = str(error).strip()
    code = re.search(r"<Code>([^<]*)</Code>", text)
    if code is not None:
        message = re.search(r"<Message>([^<]*)</Message>", text)
        return f"{code[1]}: {message[1]}"[:300] if message and message[1] else code[1][:300]
    line = text.splitlines()[0] if text else type(error).__name__
    return re.sub(r"^.*? in [0-9.]+[mµn]?s(, after [^-]*)? - ", "", line)[:300]


def _proxies() -> str:
    """A sentence on the proxies that the environment names, if any."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    found = [name for name in (*names, *map(str.lower, names)) if os.environ.get(name)]
    return f" Requests go through the proxy of {found[0]}; NO_PROXY excepts hosts." if found else ""


_FULL = (
    "QuotaExceeded|InsufficientStorage|507 Insufficient|StorageFull|XMinioStorageFull|"
    "ServiceQuotaExceeded"
)
_EXPIRED = "ExpiredToken|TokenRefreshRequired|RequestExpired"
_REPLACED = f"{_EXPIRED}|InvalidAccessKeyId|InvalidToken"
_REFUSED = r"status code: 4[0-9][0-9]"
# Codes and statuses from 400 to 499 after which the same request may succeed.
_MAY_PASS = (
    "status code: 4(08|09|23|25|29)|RequestTimeout|SlowDown|Throttl|TooManyRequests|"
    "OperationAborted|ConditionalRequestConflict"
)
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
        _EXPIRED,
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
        "InvalidObjectState",
        "the object is archived: {first}",
        "Restore it from its storage class, and except the prefix from the lifecycle rule.",
    ),
    (
        "(?i)kms[:.]",
        "the key service (KMS) refuses to {call}: {first}",
        "The credentials need kms:GenerateDataKey and kms:Decrypt for the bucket's key.",
    ),
    (
        "413 |EntityTooLarge",
        "{endpoint} refuses an object of this size: {first}",
        "Raise the limit of the proxy before the store (nginx: client_max_body_size).",
    ),
    (
        "403 Forbidden|401 Unauthorized|necessary privileges|valid authentication|"
        "AccessDenied|Access Denied",
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
        "Check the endpoint's name and the network.{proxies}",
    ),
    (
        "Connection refused|ConnectionRefused",
        "nothing answers at {endpoint}",
        "Is it running? Check the host and port.{proxies}",
    ),
    (
        "TimedOut|operation timed out|timed out",
        "{endpoint} does not answer in time",
        "Check the endpoint's host and port.{proxies}",
    ),
)
