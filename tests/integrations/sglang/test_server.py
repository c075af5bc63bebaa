"""A handle on a stand-in for an SGLang server, with a real model, loader, session and store behind
it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pulse_rl import PulseError
from pulse_rl.engines.live import LiveWeights
from pulse_rl.engines.sglang import EngineHandle, connect, is_sglang
from pulse_rl.engines.sglang.plugin import (
    begin_weight_update,
    load_weights_from_distributed,
    outcome,
    postprocess_weights,
    update,
)
from pulse_rl.errors import (
    ConcurrentUse,
    EngineError,
    EngineUnavailable,
    InputError,
    UnsupportedTensor,
)
from tests.integrations.engines.test_session import World
from tests.support.commands import Pulse
from tests.support.states import present

from .stand_in import StandIn, install, processed, serving


class Served(World):
    """A trainer, and an SGLang server that has loaded its version 0."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = StandIn(self.model, str(self.base))
        self.url = ""

    def connect(self, **options: Any) -> EngineHandle:
        handle = connect(self.url, store=self.store, stream="policy", timeout_seconds=30, **options)
        self.server.calls.clear()
        return handle


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    install(monkeypatch)
    world = Served(tmp_path)
    with serving(world.server) as world.url:
        yield world


def test_a_sync_is_one_pause_one_update_one_tag(served: Served) -> None:
    with served.connect() as handle:
        assert handle.sync() is None
        assert handle.version == 0
        for number in (1, 2, 3):
            served.step()
            served.server.calls.clear()
            done = present(handle.sync())
            assert (done.version, done.previous, done.full) == (number, number - 1, False)
            assert (done.audit_seconds is not None) == (number == 1)
            assert served.live()
            steps = ["pause retract", "begin", "update", "end", f"version {number}", "continue"]
            assert served.server.calls == steps
        assert handle.audit() == ()


def test_a_difference_is_named_and_repaired(served: Served) -> None:
    with served.connect() as handle:
        served.step()
        handle.sync()
        served.model.fused.data.view(torch.int16)[5, 1] ^= 1
        assert handle.audit() == ("up",)
        done = present(handle.sync())
        assert (done.full, served.live(), handle.audit()) == (True, True, ())


def test_dummy_weights_are_loaded_by_the_model(served: Served) -> None:
    served.server.runner.server_args.load_format = "dummy"
    with torch.no_grad():
        served.model.fused.fill_(1)
    with served.connect() as handle:
        done = present(handle.sync())
        assert (done.version, done.previous, done.full, served.live()) == (0, None, True, True)


def test_a_failed_update_leaves_bits_and_tag_and_a_server_that_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, calls = LiveWeights.put, []

    def lost(self: LiveWeights, change: Any) -> None:
        calls.append(change)
        if len(calls) == 2:
            raise RuntimeError("lost")
        put(self, change)

    with served.connect() as handle:
        served.step()
        before = [weight.clone() for weight in served.model.parameters()]
        with monkeypatch.context() as broken:
            broken.setattr(LiveWeights, "put", lost)
            with pytest.raises(PulseError, match="RuntimeError: lost"):
                handle.sync()
        assert all(
            torch.equal(a, b) for a, b in zip(before, served.model.parameters(), strict=True)
        )
        assert served.server.calls[-2:] == ["end", "continue"]
        assert served.server.weight_version == "0"
        assert handle.sync() is not None
        assert (served.live(), served.server.weight_version) == (True, "1")


@pytest.mark.parametrize(
    ("in_flight", "first"), [("keep", "pause retract"), ("abort", "pause abort"), ("wait", "begin")]
)
def test_requests_in_flight(served: Served, in_flight: Any, first: str) -> None:
    with served.connect(in_flight=in_flight) as handle:
        served.step()
        handle.sync()
        assert served.server.calls[0] == first
        assert (served.server.paused, served.server.session) == ("", None)
        assert ("continue" in served.server.calls) == (in_flight != "wait")


def test_a_roll_back_that_fails_as_well_leaves_no_version_until_all_is_written(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: LiveWeights, change: Any) -> None:
        raise RuntimeError("lost")

    with served.connect() as handle:
        served.step()
        with monkeypatch.context() as broken:
            broken.setattr(LiveWeights, "put", lost)
            with pytest.raises(PulseError, match="RuntimeError: lost"):
                handle.sync()
        assert handle.version is None
        assert served.server.weight_version == "0"
        assert served.server.session is None
        done = present(handle.sync())
        assert (done.full, served.live(), handle.audit()) == (True, True, ())


def test_a_refused_flush_retracts_what_runs(served: Served) -> None:
    """The update answers with an error though the weights are written."""
    with served.connect(in_flight="wait") as handle:
        served.step()
        served.server.running = 1
        done = present(handle.sync())
        assert (done.version, served.live()) == (1, True)
        expected = [
            *("begin", "update", "end", "version 1", "flush", "pause retract", "flush", "continue"),
        ]
        assert served.server.calls == expected


def test_a_cache_that_is_never_flushed_is_an_error_until_it_is(served: Served) -> None:
    with served.connect() as handle:
        served.step()
        served.server.stubborn = 4
        with pytest.raises(EngineError, match="did not empty its prefix cache"):
            handle.sync()
        assert (handle.version, served.live(), served.server.paused) == (1, True, "")
        served.server.calls.clear()
        assert handle.sync() is None
        assert served.server.calls == [
            "pause retract",
            "flush",
            "pause retract",
            "flush",
            "continue",
        ]
        served.server.calls.clear()
        assert handle.sync() is None
        assert served.server.calls == []


def test_a_session_that_a_dead_handle_left_open_is_ended(served: Served) -> None:
    with served.connect() as handle:
        served.server.session = "target"
        served.step()
        assert handle.sync() is not None
        assert served.server.calls[1:3] == ["end", "begin"]


def test_one_handle_drives_a_server(served: Served) -> None:
    with (
        served.connect(),
        pytest.raises(ConcurrentUse, match="another handle drives this engine along 'policy'"),
    ):
        served.connect()
    served.connect().close()


def test_a_server_that_lacks_a_part_says_so_and_goes_on(served: Served) -> None:
    served.server.plugged = False
    with pytest.raises(EngineError, match="not started with the plugin pulse") as refusal:
        served.connect()
    assert "--custom-weight-loader pulse_rl.engines.sglang.load" in refusal.value.hint
    served.server.plugged = True
    served.server.custom_weight_loaders = []
    with served.connect() as handle:
        served.step()
        with pytest.raises(EngineError, match="start the server with --custom-weight-loader"):
            handle.sync()
        assert (served.server.session, served.server.paused) == (None, "")


class Negated:
    """A method of a layer that negates and transposes what was loaded."""

    def process_weights_after_loading(self, model: Any) -> None:
        model.fused = torch.nn.Parameter(-model.fused.data.T.contiguous())


@pytest.mark.parametrize("noted", [True, False])
def test_what_is_made_of_weights_is_made_of_new_ones(served: Served, noted: bool) -> None:
    """Once, though SGLang processes all weights at the end of an update; where the first time was
    missed, not at all."""
    model: Any = served.model
    model.quant_method = Negated()
    postprocess_weights(processed, model) if noted else processed(model)
    if not noted:
        with pytest.raises(PulseError, match="does not take"):
            served.connect()
        return
    with served.connect() as handle:
        for _ in range(3):
            served.step()
            handle.sync()
            fresh = served.make()
            fresh.load_weights(served.tensors.items())
            assert torch.equal(model.fused, -fresh.fused.T)
        undone: list[Any] = []
        begin_weight_update(undone.append, served.server)
        assert not undone
        load_weights_from_distributed(lambda updater: None, served.server)
        assert undone == [served.server], "somebody else loads what a checkpoint has"


def test_models_that_cannot_follow_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attribute, value, words in [
        ("w_kc", torch.ones(2), "derived"),
        ("use_intel_amx_backend", True, "packed"),
    ]:
        layer = torch.nn.Module()
        setattr(layer, attribute, value)
        served.model.add_module("layer", layer)
        with pytest.raises(UnsupportedTensor, match=rf"'layer' with .* {words}"):
            served.connect()
        served.model.add_module("layer", None)
    install(monkeypatch, dp_size=2)
    with pytest.raises(EngineError, match="2 data-parallel replicas"):
        served.connect()


def test_other_models_and_tensors_are_refused_without_an_error_in_the_worker(
    served: Served,
) -> None:
    draft = torch.nn.Linear(2, 2)
    update(draft, [])
    assert "follows no stream" in str(outcome(draft))
    with served.connect():
        update(served.model, [("w", torch.zeros(1))])
        assert "takes no tensors" in str(outcome(served.model))


def test_arguments_are_checked_before_the_server_is_asked() -> None:
    with pytest.raises(InputError, match="no URL"):
        connect("localhost:30000", store="s", stream="policy")
    with pytest.raises(InputError, match="an address"):
        connect("http://localhost:1", store=object(), stream="policy")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="in_flight"):
        connect("http://localhost:1", store="s", stream="policy", in_flight="drop")  # type: ignore[arg-type]
    with pytest.raises(EngineUnavailable, match="no answer"):
        connect("http://127.0.0.1:1", store="s", stream="policy")


def test_a_server_is_told_from_others_by_a_harmless_look(served: Served) -> None:
    assert is_sglang(served.url, 5)
    served.server.model_info = lambda body: (200, ["something else"])  # type: ignore[method-assign]
    assert not is_sglang(served.url, 5)
    assert served.server.calls == []


def test_the_command_finds_out_what_it_drives(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    pulse = Pulse(capsys)
    served.step()
    arguments = ("follow", served.store, "--stream", "policy", "--engine", served.url, "--once")
    done = pulse.json(*arguments)
    assert (done["version"], done["previous"], served.live()) == (1, 0, True)
    assert "version 1 is live (all weights)" in pulse(*arguments)


def test_a_generation_tells_its_weights(served: Served) -> None:
    spans = [{"version": "0", "start": 0, "end": 1}]
    meta = {"output_token_logprobs": [[-0.5, 7, None]], "weight_versions": spans}
    asked: list[Any] = []

    def generate(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        return 200, {"meta_info": meta}

    served.server.generate = generate  # type: ignore[attr-defined]
    with served.connect() as handle:
        made = handle.generate([1, 2], {"max_tokens": 1}, seed=5)
    assert made.token_ids == (7,)
    assert made.logprobs == (-0.5,)
    assert made.engine == "sglang"
    assert made.weights[0].version == 0
    params = {"max_new_tokens": 1, "sampling_seed": 5}
    assert asked == [{"input_ids": [1, 2], "sampling_params": params, "return_logprob": True}]
