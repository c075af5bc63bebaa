"""The attestation that a publisher stores with each anchor: there with it, gone with it, and about
its files."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse_rl import (
    Bits,
    MemoryStore,
    Publisher,
    Relay,
    Signer,
    Store,
    checkout,
    gc_stream,
    verify_stream,
)
from pulse_rl.errors import InputError, StoreUnavailable
from tests.support.stores import FaultyStore

SIGNER = Signer(bytes(32))
FILES = {"config.json": b"{}", "chat/template.jinja": b"{{ x }}"}
LARGE = (1 << 22) + 70_001
"""More elements than a block has."""


def states(count: int, elements: int = 3000) -> list[dict[str, Any]]:
    """Each differs a little from the one before; a tensor is tied."""
    now = np.random.default_rng(5).integers(0, 1 << 15, elements, np.uint16)
    made = []
    for version in range(count):
        now = now.copy()
        now[version :: elements // 40] ^= 1
        made.append({"w": Bits(now, "BF16"), "b": np.float32([version, 0.5])})
    return made


def publish(store: Store, anchors: tuple[int, ...], count: int = 5, **settings: Any) -> None:
    given: dict[str, Any] = {"signer": SIGNER, "attest": True, "threads": 1, **settings}
    with Publisher(store, stream="policy", **given) as publisher:
        for version, state in enumerate(states(count)):
            publisher.publish(
                state, anchor=version in anchors, files=FILES, metadata={"step": version}
            )


def attested(store: Store) -> dict[int, Any]:
    """The statements that the manifests name, by version."""
    found = {}
    for info in store.list("policy/versions"):
        manifest = json.loads(store.get(info.name))
        if said := (manifest["anchor"] or {}).get("attestation"):
            bundle = json.loads(store.get(f"policy/payloads/{said['sha256']}.file"))
            found[manifest["version"]] = json.loads(
                base64.b64decode(bundle["dsseEnvelope"]["payload"])
            )
    return found


def problems(store: Store) -> list[str]:
    reports = verify_stream(store, "policy", trusted_keys=[SIGNER.public_key], threads=1)
    return [problem for report in reports for problem in report.problems]


@pytest.mark.parametrize("baseline", [True, False])
def test_an_anchor_beside_a_patch_is_attested_as_it_will_be(tmp_path: Path, baseline: bool) -> None:
    """From the changes, before the baseline has them; `verify_stream` makes the statement again
    from the store."""
    store, given = MemoryStore(), {"baseline": tmp_path / "b"} if baseline else {}
    first, second, third = states(3, LARGE)
    with Publisher(
        store, stream="policy", signer=SIGNER, attest=True, threads=1, **given
    ) as publisher:
        publisher.publish(first, files=FILES)
        assert publisher.publish(second, anchor=True).patch_bytes
        publisher.publish(third, anchor=True, files={})
    found = attested(store)
    assert sorted(found) == [0, 1, 2]
    assert found[1]["predicate"]["pulse"]["publisherKey"] == SIGNER.public_key
    assert [each["name"] for each in found[1]["predicate"]["resources"]] == [
        *sorted(FILES),
        "model.safetensors",
    ]
    assert [each["name"] for each in found[2]["predicate"]["resources"]] == ["model.safetensors"]
    assert not problems(store)


def test_gc_keeps_it_with_its_anchor_and_a_relay_copies_it() -> None:
    store, near = MemoryStore(), MemoryStore()
    publish(store, (2, 4))
    Relay(store, near, stream="policy", trusted_keys=[SIGNER.public_key], threads=1).sync()
    assert attested(near).keys() <= {0, 2, 4}
    assert 4 in attested(near)
    assert not problems(near)
    gc_stream(store, "policy", keep=2, grace_seconds=0)
    assert sorted(attested(store)) == [2, 4]
    kept = [info.name for info in store.list("policy/payloads") if info.name.endswith(".file")]
    assert len(kept) == len(FILES) + 2
    assert not problems(store)


def test_verify_names_what_is_lost_damaged_or_about_another_version() -> None:
    store = MemoryStore()
    publish(store, (2,))
    said = json.loads(store.get("policy/versions/000000000002.json"))["anchor"]["attestation"]
    path = f"policy/payloads/{said['sha256']}.file"
    data = store.get(path)
    store.put(path, data[:-1] + b" ")
    assert (
        [problem for problem in problems(store) if problem.startswith("attestation: ")]
        == problems(store)
        != []
    )
    store.delete(path)
    assert (
        [problem for problem in problems(store) if problem.startswith("attestation: ")]
        == problems(store)
        != []
    )
    store.put(path, data)
    assert not problems(store)
    # The publisher itself names that of another version.
    with (
        checkout(store, "policy", version=0) as first,
        checkout(store, "policy", version=2) as second,
    ):
        assert first.manifest.anchor is not None
        assert first.manifest.anchor.attestation is not None
        wrong = second.manifest.with_attestation(first.manifest.anchor.attestation)
    store.put("policy/versions/000000000002.json", SIGNER.sign(wrong).to_bytes())
    assert problems(store) == ["its attestation is about something else"]


def test_a_publisher_that_dies_anywhere_leaves_no_anchor_without() -> None:
    """Each call of a publish with an anchor fails, before or after its effect; the next publisher
    goes on."""
    for after in (False, True):
        for call in range(100):
            store = FaultyStore(MemoryStore())
            publish(store, (), 2)
            with Publisher(
                store, stream="policy", signer=SIGNER, attest=True, threads=1
            ) as publisher:
                publisher.head()
                store.fail(call, after=after)
                with suppress(StoreUnavailable):
                    publisher.publish(states(3)[2], anchor=True)
            store.heal()
            publish(store, (0,), 1)
            said = [json.loads(store.get(info.name)) for info in store.list("policy/versions")]
            anchors = [manifest["version"] for manifest in said if manifest["anchor"]]
            assert [*attested(store)] == anchors != [0]
            assert not problems(store)
            if not store.fired:
                break
        else:
            pytest.fail("a publish has more than 100 calls")
        assert call > 5


@pytest.mark.parametrize("given", [{"signer": None}, {"attest": "attest.pem"}])
def test_it_wants_the_signers_key(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="attest") as raised:
        publish(MemoryStore(), (), **given)
    assert raised.value.hint


def test_without_it_a_manifest_says_nothing_of_it() -> None:
    store = MemoryStore()
    publish(store, (), 2, attest=False)
    assert not attested(store)
    assert b"attestation" not in store.get("policy/versions/000000000000.json")
