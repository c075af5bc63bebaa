"""The weight transfer as TRL calls it, without TRL: order, dtypes, and who waits for whom."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pulse_rl import Publisher, Signer, Subscriber, state_root
from pulse_rl.errors import (
    ConcurrentUse,
    EmptyStream,
    EngineError,
    EngineUnavailable,
    InputError,
    PublisherConflict,
    StoreUnavailable,
)
from pulse_rl.frameworks.trl import PulseWeightTransfer
from tests.support.states import present

from .server import PretendedServer

pytestmark = pytest.mark.slow  # it imports transformers

WEIGHTS = {"a.weight": torch.linspace(-1, 1, 30).reshape(5, 6), "b": torch.arange(4)}


def sent(weights: dict[str, torch.Tensor] = WEIGHTS) -> Iterator[tuple[str, torch.Tensor]]:
    """What TRL sends: tensors that the next step of the iterator may overwrite are its own."""
    yield from weights.items()


def synced(transfer: PulseWeightTransfer, weights: Any = None) -> None:
    """A weight sync as TRL does it."""
    transfer.pause()
    transfer.send_weights(sent() if weights is None else weights)
    transfer.resume()


def test_weights_are_published_in_the_server_s_dtype_and_made_live(
    server: PretendedServer, tmp_path: Path
) -> None:
    transfer = PulseWeightTransfer(server.url, str(tmp_path), "policy")
    transfer.init_weight_transfer()
    assert server.handle.followed  # a server that is restarted between two syncs catches up
    synced(transfer)
    expected = {"a.weight": WEIGHTS["a.weight"].bfloat16(), "b": WEIGHTS["b"]}
    subscriber = Subscriber(str(tmp_path), stream="policy")
    update = present(subscriber.sync())
    assert update.metadata == {"sync": 1}
    assert state_root(subscriber.state) == state_root(expected)
    assert server.tag == "0"
    assert transfer.published is not None
    assert transfer.synced is not None
    assert (transfer.published.version, transfer.synced.version) == (0, 0)
    transfer.destroy()
    assert server.handle.closed
    transfer.destroy()
    synced(
        transfer, iter({**WEIGHTS, "a.weight": -WEIGHTS["a.weight"]}.items())
    )  # a second train() has no init
    assert server.tag == "1"
    transfer.destroy()


@pytest.mark.parametrize(("dtype", "published"), [("float16", "F16"), ("float32", "F32")])
def test_the_server_says_the_dtype(
    server: PretendedServer, tmp_path: Path, dtype: str, published: str
) -> None:
    server.dtype = f"torch.{dtype}"
    transfer = PulseWeightTransfer(server.url, str(tmp_path), "policy")
    synced(transfer)
    subscriber = Subscriber(str(tmp_path), stream="policy")
    subscriber.sync()
    assert {spec.name: spec.dtype.name for spec in subscriber.state.specs} == {
        "a.weight": published,
        "b": "I64",
    }
    transfer.destroy()


def test_the_names_are_those_of_the_model_without_wrappers(
    server: PretendedServer, tmp_path: Path
) -> None:
    transfer = PulseWeightTransfer(server.url, str(tmp_path), "policy")
    synced(transfer, iter({"_orig_mod.a": torch.zeros(3)}.items()))
    subscriber = Subscriber(str(tmp_path), stream="policy")
    subscriber.sync()
    assert list(subscriber.state.names) == ["a"]
    transfer.destroy()


def test_the_training_waits_while_the_store_or_the_server_is_away(
    server: PretendedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    transfer = PulseWeightTransfer(server.url, str(tmp_path), "policy", retry_seconds=30)
    server.refusals = [503, 500]
    transfer.init_weight_transfer()
    server.errors = [
        EngineUnavailable("gone"),
        EngineUnavailable("gone"),
        StoreUnavailable("away"),
        ConcurrentUse("x"),
    ]
    synced(transfer)
    assert server.tag == "0"
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert sum("gone; the training waits" in words for words in warnings) == 1
    assert sum("the training goes on" in words for words in warnings) == 2
    assert any("version 0 is live" in r.message for r in caplog.records)
    transfer.destroy()


def test_what_stays_away_is_an_error_after_retry_seconds(
    server: PretendedServer, tmp_path: Path
) -> None:
    transfer = PulseWeightTransfer(server.url, str(tmp_path), "policy", retry_seconds=0.1)
    transfer.init_weight_transfer()
    server.errors = [EngineUnavailable("gone")] * 1000
    with pytest.raises(EngineUnavailable, match="gone"):
        synced(transfer)
    assert len(server.errors) < 999
    transfer.destroy()


def test_a_folder_means_the_same_to_a_server_that_runs_elsewhere(
    server: PretendedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    transfer = PulseWeightTransfer(server.url, "run", "policy", retry_seconds=0.1)
    synced(transfer)
    assert server.handle.options["store"] == str(tmp_path / "run")
    server.errors = [EmptyStream("nothing was synced")] * 1000
    with pytest.raises(EngineUnavailable, match="finds no version") as refusal:
        synced(transfer)
    assert "same store" in refusal.value.hint
    transfer.destroy()


@pytest.mark.parametrize("error", [EngineError("no"), InputError("no"), PublisherConflict("no")])
def test_what_does_not_pass_is_raised_at_once(
    server: PretendedServer, tmp_path: Path, error: Any
) -> None:
    transfer = PulseWeightTransfer(server.url, str(tmp_path), "policy", retry_seconds=3600)
    server.errors = [error]
    with pytest.raises(type(error)):
        synced(transfer)
    transfer.destroy()


def test_a_server_without_the_routes_is_named(server: PretendedServer, tmp_path: Path) -> None:
    transfer = PulseWeightTransfer(server.url, str(tmp_path), "policy")
    server.refusals = [404]
    with pytest.raises(EngineError, match="no route /server_info") as refusal:
        transfer.init_weight_transfer()
    assert "VLLM_SERVER_DEV_MODE=1" in refusal.value.hint
    server.dtype = "torch.float8_e4m3fn"
    with pytest.raises(EngineError, match="computes in"):
        transfer.init_weight_transfer()


def test_what_the_publisher_signs_the_server_trusts(
    server: PretendedServer, tmp_path: Path
) -> None:
    signer, other = Signer.generate(), Signer.generate().public_key
    options = {"in_flight": "wait"}
    transfer = PulseWeightTransfer(
        server.url, str(tmp_path), "policy", signer=signer, trusted_keys=[other], engine=options
    )
    synced(transfer)
    assert server.handle.options["trusted_keys"] == [signer.public_key, other]
    assert server.handle.options["in_flight"] == "wait"
    assert Publisher(str(tmp_path), stream="policy", signer=signer).head() is not None
    transfer.destroy()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"server_url": "localhost:8000"}, "no URL"),
        ({"store": object()}, "address"),
        ({"retry_seconds": -1}, "retry_seconds"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        PulseWeightTransfer(
            **{"server_url": "http://h:1", "store": "s", "stream": "policy", **arguments}
        )
