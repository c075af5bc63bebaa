"""A subscriber that is given trusted keys accepts nothing else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from pulse_rl import MemoryStore, Publisher, Signer, Subscriber, state_root
from pulse_rl.errors import ChainGap, CorruptManifest, InputError, Untrusted
from pulse_rl.events import Event, FallbackUsed
from pulse_rl.stream.signing import TrustedKeys
from pulse_rl.stream.stream import Stream
from tests.support.checkpoints import write_checkpoint
from tests.support.commands import Pulse
from tests.support.states import present, taken

STATE = {"w": np.arange(1000, dtype=np.float32)}


@pytest.mark.parametrize("signer", [None, Signer.generate()])
def test_unsigned_and_strange_signatures_are_refused(signer: Signer | None) -> None:
    store, trusted = MemoryStore(), Signer.generate()
    Publisher(store, stream="s", signer=trusted).publish(STATE)
    events: list[Event] = []
    subscriber = Subscriber(
        store, stream="s", trusted_keys=[trusted.public_key], on_event=events.append
    )
    assert taken(subscriber)
    Publisher(store, stream="s", signer=signer).publish({"w": STATE["w"] * 2})
    assert subscriber.sync() is None
    assert subscriber.root == state_root(STATE)
    (refused,) = [event for event in events if isinstance(event, FallbackUsed)]
    assert (refused.link, refused.kind) == ("version 1", "untrusted")
    with pytest.raises(ChainGap, match=r"not signed|untrusted key"):
        subscriber.sync(target=1)
    empty = MemoryStore()
    Publisher(empty, stream="s", signer=signer).publish(STATE)
    with pytest.raises(Untrusted, match=r"not signed|untrusted key"):
        Subscriber(empty, stream="s", trusted_keys=[trusted.public_key]).sync()


def test_a_changed_manifest_loses_its_signature(store: MemoryStore, signer: Signer) -> None:
    Publisher(store, stream="s", signer=signer).publish(STATE)
    manifest = Stream(store, "s").manifest(0)
    keys = TrustedKeys([signer.public_key])
    keys.check(manifest)
    for change in (
        {"root": "0" * 64},
        {"version": 1},
        {"aliases": {"a": "w"}},
        {"created": 0.0},
        {"stream": "t"},
    ):
        with pytest.raises(Untrusted):
            keys.check(msgspec.structs.replace(manifest, **change))
    assert manifest.signature is not None
    forged = msgspec.structs.replace(manifest.signature, value="zz")
    with pytest.raises(Untrusted):
        keys.check(manifest.with_signature(forged))


def test_a_payload_of_the_attacker_leads_nowhere(store: MemoryStore, signer: Signer) -> None:
    """The manifest is signed and names the root: another payload, under whatever name, is
    refused."""
    publisher = Publisher(store, stream="s", signer=signer)
    publisher.publish(STATE)
    publisher.publish({"w": STATE["w"] + 1})
    payload = present(Stream(store, "s").manifest(1).patch)
    store.put(
        f"s/payloads/{payload.parts[0].sha256}.patch",
        store.get(f"s/payloads/{payload.parts[0].sha256}.patch")[::-1],
    )
    keys = [Signer.generate().public_key, signer.public_key]
    subscriber = Subscriber(store, stream="s", trusted_keys=keys)
    with pytest.raises(ChainGap):
        subscriber.sync()
    assert subscriber.root == state_root(STATE)


def test_a_signature_has_one_spelling(store: MemoryStore) -> None:
    """Bytes that nobody has signed so must not pass for a manifest that somebody has."""
    Publisher(store, stream="s", signer=Signer(bytes(32))).publish({"w": np.zeros(4, np.float32)})
    name = "s/versions/000000000000.json"
    signed = Stream(store, "s").manifest(0)
    assert signed.signature is not None
    value = signed.signature.value
    for other in (value.upper(), f" {value}", f"{value[:64]} {value[64:]}"):
        spelled = msgspec.structs.replace(signed.signature, value=other)
        store.put(name, signed.with_signature(spelled).to_bytes())
        with pytest.raises(CorruptManifest, match="lower-case"):
            Stream(store, "s").manifest(0)


def test_keys_are_kept_in_files(tmp_path: Path, signer: Signer) -> None:
    signer.save(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    assert Signer.load(tmp_path / "key").public_key == signer.public_key
    (tmp_path / "bad").write_text("not a key")
    for path in ("bad", "missing"):
        with pytest.raises(InputError):
            Signer.load(tmp_path / path)
    for keys in ([], ["abc"], ["zz" * 32], signer.public_key):
        with pytest.raises(InputError):
            TrustedKeys(keys)


def test_the_command_line_signs_and_trusts(tmp_path: Path, pulse: Pulse) -> None:
    write_checkpoint(tmp_path / "w.safetensors", STATE)
    store = tmp_path / "store"
    key = pulse("keygen", tmp_path / "key").strip()
    pulse("keygen", tmp_path / "key", status=1)
    publish = ("publish", tmp_path / "w.safetensors", store, "--stream", "s")
    follow = ("follow", store, "--stream", "s", "--once", "--out")
    pulse(*publish, "--sign-key", tmp_path / "key")
    pulse(*follow, tmp_path / "a", "--trust", key, "--cache", tmp_path / "cache")
    pulse("verify", store, "--stream", "s", "--trust", key)
    pulse(*publish, status=1)
    assert "is signed (Give the key" in pulse.err
    Publisher(store, stream="s").publish({"w": STATE["w"] + 1})  # a stranger
    pulse(*follow, tmp_path / "b", "--trust", key)
    assert state_root(tmp_path / "b") == state_root(STATE)
    pulse("relay", store, tmp_path / "near", "--stream", "s", "--once", "--trust", key)
    pulse("verify", tmp_path / "near", "--stream", "s")
    pulse("verify", store, "--stream", "s", "--trust", key, status=1)
    pulse("verify", store, "--stream", "s")
