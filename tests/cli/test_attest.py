"""Attestations: what the statement says is what a checkout has, and the stock verifier takes it and
nothing else."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from pulse_rl import Bits, Publisher, Signer
from tests.support.commands import POLICY, Pulse
from tests.support.states import Rng, weights

VERIFIER = os.environ.get("PULSE_MODEL_SIGNING") or shutil.which("model_signing")
PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
PUBLIC = serialization.PublicFormat.SubjectPublicKeyInfo
OPEN = serialization.NoEncryption()
FILES = {"chat/template.jinja": b"{{ x }}", "chat-notes.txt": b"n", "config.json": b"{}"}


def write_key(file: Path, key: Any, how: serialization.KeySerializationEncryption = OPEN) -> Path:
    """The private key in ``file``; the public one beside it, as .pub."""
    file.write_bytes(key.private_bytes(PEM, PKCS8, how))
    file.with_suffix(".pub").write_bytes(key.public_key().public_bytes(PEM, PUBLIC))
    return file


def publish(folder: Path, rng: Rng, signer: Signer | None = None) -> None:
    with Publisher(str(folder), stream="policy", signer=signer) as publisher:
        for step in range(3):
            tensors = {"w": Bits(weights(rng, 5000).array, "BF16"), "b": weights(rng, 10)}
            publisher.publish(tensors, metadata={"step": step, "loss": 0.5}, files=FILES)


@pytest.fixture
def place(tmp_path: Path, rng: Rng) -> Path:
    """With a stream in ``store``, and a key."""
    publish(tmp_path / "store", rng)
    write_key(tmp_path / "key.pem", ec.generate_private_key(ec.SECP256R1()))
    return tmp_path


def attest(pulse: Pulse, place: Path, *options: object, version: int = 1) -> tuple[Path, Path]:
    """A version's statement, and its folder without links."""
    of = (place / "store", "--stream", "policy", "--version", version)
    signature, folder = place / f"{version}.sig", place / f"out-{version}"
    pulse("checkout", *of, "--out", folder, *options)
    pulse("attest", *of, "--key", place / "key.pem", "-o", signature, *options)
    return signature, (folder / ".pulse/current").resolve()


def statement_in(bundle: Any, public_key: bytes) -> Any:
    """The statement, once its signature is checked by the rules of DSSE. Raises
    InvalidSignature."""
    envelope = bundle["dsseEnvelope"]
    kind, payload = envelope["payloadType"], base64.b64decode(envelope["payload"])
    signed = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    key: Any = serialization.load_pem_public_key(public_key)
    algorithm = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}[
        key.curve.key_size
    ]
    (signature,) = envelope["signatures"]
    key.verify(base64.b64decode(signature["sig"]), signed, ec.ECDSA(algorithm))
    assert bundle["verificationMaterial"]["publicKey"]["hint"] == sha256(public_key).hexdigest()
    return json.loads(payload)


@pytest.mark.parametrize("curve", [ec.SECP256R1, ec.SECP384R1, ec.SECP521R1])
@pytest.mark.parametrize("layout", [[], ["--sharded"]])
def test_it_names_the_files_of_a_checkout(
    pulse: Pulse, place: Path, curve: Any, layout: list[str]
) -> None:
    write_key(place / "key.pem", ec.generate_private_key(curve()))
    signature, folder = attest(pulse, place, *layout)
    statement = statement_in(json.loads(signature.read_text()), (place / "key.pub").read_bytes())
    found = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
    found.pop("pulse.history", None)
    listed = statement["predicate"]["resources"]
    assert {each["name"]: each["digest"] for each in listed} == {
        n: sha256(d).hexdigest() for n, d in found.items()
    }
    assert len(found) == len(FILES) + (2 if layout else 1)
    (subject,) = statement["subject"]
    assert (
        subject["digest"]["sha256"]
        == sha256(b"".join(bytes.fromhex(each["digest"]) for each in listed)).hexdigest()
    )

    base, own = pulse.json("log", place / "store", "--stream", "policy", "--last", 0)["versions"][
        :2
    ]
    facts = statement["predicate"]["pulse"]
    assert facts["root"] == subject["digest"]["pulseRoot"] == own["root"]
    assert facts["base"] == {"version": 0, "root": base["root"]}
    assert (facts["stream"], facts["version"], facts["publisherKey"]) == ("policy", 1, None)
    assert facts["metadata"] == {"step": 1, "loss": 0.5}


def test_without_a_number_it_is_the_newest_and_is_printed(pulse: Pulse, place: Path) -> None:
    bundle = pulse.json("attest", place / "store", "--stream", "policy", "--key", place / "key.pem")
    assert (
        statement_in(bundle, (place / "key.pub").read_bytes())["predicate"]["pulse"]["version"] == 2
    )


def test_the_publishers_key_is_named_where_its_signature_is_one(
    pulse: Pulse, place: Path, rng: Rng, signer: Signer
) -> None:
    publish(place / "signed", rng, signer)
    command = ("attest", place / "signed", *POLICY, "--key", place / "key.pem", "--version", 1)
    bundle = pulse.json(*command, "--trust", signer.public_key)
    assert statement_in(bundle, (place / "key.pub").read_bytes())["predicate"]["pulse"][
        "publisherKey"
    ] == (signer.public_key)
    pulse.refused(
        *command, "--trust", Signer.generate().public_key, kind="chain_gap", match="untrusted key"
    )
    manifest = place / f"signed/policy/versions/{1:012d}.json"
    value = json.loads(manifest.read_bytes())["signature"]["value"]
    manifest.write_bytes(manifest.read_bytes().replace(value.encode(), b"0" * len(value)))
    pulse.refused(*command, kind="untrusted", match="invalid signature")


def test_other_keys_are_refused(pulse: Pulse, place: Path) -> None:
    command = (
        "attest",
        place / "store",
        *POLICY,
        "-o",
        place / "x.sig",
        "--key",
        place / "other.pem",
    )
    pulse.refused(*command, kind="input", match="No such file")
    for key in (ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256K1())):
        write_key(place / "other.pem", key)
        pulse.refused(*command, kind="input", match="is not a key of P-256")
    secret = serialization.BestAvailableEncryption(b"secret")
    write_key(place / "other.pem", ec.generate_private_key(ec.SECP256R1()), secret)
    pulse.refused(*command, kind="input", match="is not a private key: ")
    (place / "other.pem").write_text("what is no key")
    pulse.refused(*command, kind="input", match="is not a private key: ")
    assert not (place / "x.sig").exists()


def test_only_an_attestation_is_replaced(pulse: Pulse, place: Path) -> None:
    attest(pulse, place)
    attest(pulse, place)
    (place / "1.sig").write_text("mine")
    command = (
        "attest",
        place / "store",
        *POLICY,
        "--key",
        place / "key.pem",
        "-o",
        place / "1.sig",
    )
    pulse.refused(*command, kind="input", match="was not written by this command")
    assert "version 2 of policy, 4 files" in pulse(*command, "--force")


@pytest.mark.slow
@pytest.mark.skipif(
    VERIFIER is None,
    reason="no model_signing here: pip install model-signing==1.1.1 pyOpenSSL, or name it in "
    "PULSE_MODEL_SIGNING",
)
def test_model_signing_takes_it_and_nothing_else(pulse: Pulse, place: Path) -> None:
    signature, folder = attest(pulse, place, version=2)
    other, _ = attest(pulse, place)
    write_key(place / "stranger.pem", ec.generate_private_key(ec.SECP256R1()))

    def changed(name: str) -> Path:
        """A copy, in which something is about to be changed."""
        shutil.copytree(folder, place / name)
        return place / name

    (folder / "pulse.history").write_bytes(b"what a follower remembers is no part of a version")
    flipped = changed("flipped") / "model.safetensors"
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    swapped = changed("swapped")
    (swapped / "config.json").write_bytes(FILES["chat-notes.txt"])
    (swapped / "chat-notes.txt").write_bytes(FILES["config.json"])
    (changed("more") / "pytorch_model.bin").write_bytes(b"loaded first")
    taken = "Verification succeeded"
    cases = [
        ([folder], signature, "key.pub", taken),
        ([place / "out-2/.pulse/current", "--allow_symlinks"], signature, "key.pub", taken),
        ([place / "flipped"], signature, "key.pub", "Hash mismatch for 'model.safetensors'"),
        ([swapped], signature, "key.pub", "Hash mismatch for 'chat-notes.txt'"),
        ([place / "more"], signature, "key.pub", "Extra files found"),
        ([folder], other, "key.pub", "Hash mismatch for 'model.safetensors'"),
        ([folder], signature, "stranger.pub", "Key mismatch"),
    ]
    # The package takes a second or more to import: all at once.
    running = [
        subprocess.Popen(
            [
                str(VERIFIER),
                "verify",
                "key",
                *map(str, what),
                "--signature",
                by,
                "--public_key",
                place / key,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for what, by, key, _ in cases
    ]
    for process, (_, _, _, said) in zip(running, cases, strict=True):
        output = process.communicate(timeout=120)[0].replace(
            "\\", ""
        )  # quoted, if a digest's bytes have a quote
        assert said in output
        assert process.returncode == (0 if said == taken else 1)
