"""A version as an in-toto statement in a DSSE envelope, which the OpenSSF's ``model_signing verify
key`` reads (docs/attestations.md).

The statement is about files, as an auditor has them: those that `Subscriber.save` writes, to the
byte. The weights are hashed as they would be written, and nothing is.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from .._util.files import open_regular
from ..errors import InputError
from ..events import Listener
from ..follow.checkpoint import PRIVATE
from ..follow.folder import checkpoint_files, metadata_of
from ..store import Store
from ..stream.signing import TrustedKeys
from ..sync.subscriber import Subscriber

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
_PAYLOAD = "application/vnd.in-toto+json"
#: The attestation in a checkout's folder.
SIGNATURE = "pulse.sig"
# In a folder that pulse writes: the files of its versions, which it shows by links, what is
# remembered of versions before this one, and the attestation itself.
_NOT_SIGNED = (PRIVATE, "pulse.history", SIGNATURE)
_KEY_FILE_BYTES = 1 << 16
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_HINT = "Make one: openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out FILE"


class AttestationKey:
    """The elliptic curve key that signs statements: the verifiers of ``model_signing`` take no
    Ed25519 keys, which streams are signed with.

    Args:
        path: A file with a key of P-256, P-384 or P-521 in PEM without a password.
    Raises:
        InputError: There is no such key, or the package cryptography is missing.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise InputError(
                "attestations need the package cryptography",
                hint="Install it: pip install 'pulse-rl[sign]'.",
            ) from error
        try:
            with open_regular(Path(path)) as file:
                data = file.read(_KEY_FILE_BYTES)
            key = serialization.load_pem_private_key(data, None)
        except InputError as error:
            raise InputError(str(error), hint=_HINT) from None
        except (OSError, ValueError, TypeError) as error:  # TypeError: it has a password
            reason = error.strerror if isinstance(error, OSError) else str(error).split(". ")[0]
            raise InputError(f"{path} is not a private key: {reason}", hint=_HINT) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in _CURVES:
            raise InputError(f"{path} is not a key of P-256, P-384 or P-521", hint=_HINT)
        digest = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}[
            key.curve.key_size
        ]
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self._key, self._algorithm = key, ec.ECDSA(digest)
        self._hint = sha256(public).hexdigest()

    def bundle(self, statement: dict[str, Any]) -> dict[str, Any]:
        """``statement`` as a Sigstore bundle: its DSSE envelope, and which key has signed."""
        payload = json.dumps(statement, separators=(",", ":"), ensure_ascii=False).encode()
        signed = b" ".join(
            [b"DSSEv1", b"%d" % len(_PAYLOAD), _PAYLOAD.encode(), b"%d" % len(payload), payload]
        )
        signature = base64.b64encode(self._key.sign(signed, self._algorithm)).decode()
        return {
            "mediaType": BUNDLE,
            "verificationMaterial": {
                "publicKey": {"hint": self._hint},
                "tlogEntries": [],
            },
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": _PAYLOAD,
                "signatures": [{"sig": signature, "keyid": ""}],
            },
        }


def make_statement(
    store: Store | str,
    stream: str,
    version: int | None = None,
    *,
    sharded: bool = False,
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
    threads: int | None = None,
    on_event: Listener | None = None,
) -> dict[str, Any]:
    """Return the in-toto statement of a version, which is fetched and verified: the digests of the
    files that a checkout of it has, and what the stream says of it.

    Args:
        store: The store, or its address.
        stream: The stream's name.
        version: The number of the version. Default: the newest.
        sharded: As for `Subscriber.save`.
        trusted_keys: As for `Subscriber`.
        stream_id: As for `Subscriber`.
        threads: As for `Subscriber`.
        on_event: As for `Subscriber`.
    Returns: The statement, as JSON values.
    Raises:
        InputError: An argument makes no sense.
        Untrusted: The version's signature is none.

    It also raises what `Subscriber.sync` raises.
    """
    with Subscriber(
        store,
        stream=stream,
        trusted_keys=trusted_keys,
        stream_id=stream_id,
        threads=threads,
        on_event=on_event,
    ) as subscriber:
        subscriber.sync(version)
        manifest = subscriber.manifest
        written = checkpoint_files(
            subscriber.state,
            subscriber.digest,
            subscriber.files(),
            metadata_of(manifest.version, manifest.root),
            sharded=sharded,
        )
        digests = {name: _digest(chunks) for name, chunks, _ in written}
    # In the order of the paths' parts: the verifier sorts so, and hashes in the order that it finds
    # here.
    names = sorted(digests, key=lambda name: name.split("/"))
    whole = _digest(bytes.fromhex(digests[name]) for name in names)
    patch, key = manifest.patch, None
    if manifest.signature is not None:
        key = manifest.signature.key
        TrustedKeys([key]).check(manifest)
    return {
        "_type": _STATEMENT,
        "subject": [
            {
                "name": f"{manifest.stream}-{manifest.version}",
                "digest": {"sha256": whole, "pulseRoot": manifest.root},
            }
        ],
        "predicateType": _PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": list(_NOT_SIGNED),
            },
            "resources": [
                {"name": name, "algorithm": "sha256", "digest": digests[name]} for name in names
            ],
            "pulse": {
                "stream": manifest.stream,
                "streamId": manifest.stream_id,
                "version": manifest.version,
                "root": manifest.root,
                "base": {"version": patch.base, "root": patch.base_root} if patch else None,
                "metadata": manifest.metadata,
                "publisherKey": key,
            },
        },
    }


def _digest(chunks: Iterable[bytes | memoryview]) -> str:
    found = sha256()
    for chunk in chunks:
        found.update(chunk)
    return found.hexdigest()
