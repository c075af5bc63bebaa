"""An LLM follows a stream: right answers, right bits, roll-back, and proof, with vLLM's own
arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.engines import slow_down
from pulse_rl import PulseError
from pulse_rl.engines.vllm import EngineHandle, connect
from pulse_rl.errors import StoreUnavailable

from .engines import answer, checksums, continuation, engine
from .policy import Policy

#: Of BF16 arithmetic, in log-probabilities: an engine's answers vary by less from one batch to
#: another.
NOISE = 0.02
#: Between an engine's BF16 and Hugging Face's FP32 arithmetic, in the mean over a prompt.
REFERENCE_NOISE = 0.02


def break_after_first_write(worker: Any) -> None:
    """The first update of a parameter succeeds, the second raises; only on the last worker."""
    from pulse_rl.engines.live import LiveWeights

    if worker.rank != worker.parallel_config.world_size - 1:
        return
    put, calls = LiveWeights.put, []

    def failing(self: Any, change: Any) -> None:
        calls.append(change)
        if len(calls) == 2:
            LiveWeights.put = put  # type: ignore[method-assign]
            raise RuntimeError("the device is lost")
        put(self, change)

    LiveWeights.put = failing  # type: ignore[method-assign]


def lose_the_store(worker: Any) -> None:
    """Every read of the store fails, until `find_the_store`."""
    from pulse_rl import LocalStore
    from pulse_rl.errors import StoreUnavailable

    def get(self: Any, name: str, start: int = 0, stop: int | None = None) -> bytes:
        raise StoreUnavailable("the store is away")

    worker.store_get = LocalStore.get
    LocalStore.get = get  # type: ignore[method-assign]


def find_the_store(worker: Any) -> None:
    from pulse_rl import LocalStore

    LocalStore.get = worker.store_get  # type: ignore[method-assign]


def flip_one_bit(worker: Any) -> None:
    """In one element of the first layer's down projection, on the last worker."""
    if worker.rank == worker.parallel_config.world_size - 1:
        weight = worker.get_model().model.layers[0].mlp.down_proj.weight.data
        weight.view(torch.int16)[3, 5] ^= 1


@pytest.mark.parametrize(
    ("policy", "tensor_parallel"),
    [
        pytest.param(True, 1, marks=pytest.mark.slow),
        (True, 2),
        (False, 1),
        pytest.param(False, 2, marks=pytest.mark.slow),
    ],
    indirect=["policy"],
    ids=["tied-1", "tied-2", "untied-1", "untied-2"],
)
def test_twenty_updates_a_failed_one_and_thirty_at_once(
    policy: Policy, tensor_parallel: int
) -> None:
    with engine(policy.checkpoint, tensor_parallel=tensor_parallel) as llm:
        with connect(llm, store=policy.store, stream="policy") as handle:
            follow_for_twenty_updates(policy, llm, handle)
            a_failed_update_is_rolled_back(policy, llm, handle)
            a_store_that_is_away_changes_nothing(policy, llm, handle)
            for _ in range(30):
                policy.step(density=0.01)
            report = handle.sync()
            assert (report.version, report.full) == (policy.version, False)
            assert handle.audit() == ()
            a_flipped_bit_is_found_and_repaired(policy, llm, handle)
        last, live = answer(llm), checksums(llm)
    with engine(policy.save("last"), tensor_parallel=tensor_parallel) as fresh:
        log_probabilities, tokens = answer(fresh)
        assert torch.allclose(last[0], log_probabilities, atol=NOISE, rtol=0)
        assert last[1] == tokens
        assert live == checksums(fresh)


def follow_for_twenty_updates(policy: Policy, llm: Any, handle: EngineHandle) -> None:
    before = policy.log_probabilities()
    for number in range(1, 21):
        policy.step()
        report = handle.sync()
        assert (report.version, report.previous, report.full) == (number, number - 1, False)
        assert (report.audit_seconds is not None) == (number == 1)
        found, now = answer(llm)[0], policy.log_probabilities()
        assert (now - before).abs().mean() > 5 * REFERENCE_NOISE
        assert (now - found).abs().mean() < REFERENCE_NOISE
        before = now
    assert handle.sync() is None
    assert handle.version == 20
    assert handle.audit() == ()


def a_failed_update_is_rolled_back(policy: Policy, llm: Any, handle: EngineHandle) -> None:
    bits, before = checksums(llm), handle.version
    policy.step()
    llm.collective_rpc(break_after_first_write)
    with pytest.raises(PulseError, match="the device is lost"):
        handle.sync()
    assert checksums(llm) == bits
    assert handle.version == before
    report = handle.sync()
    assert (report.version, report.previous) == (policy.version, before)
    assert checksums(llm) != bits


def a_store_that_is_away_changes_nothing(policy: Policy, llm: Any, handle: EngineHandle) -> None:
    bits, before = checksums(llm), handle.version
    llm.collective_rpc(lose_the_store)
    policy.step()
    with pytest.raises(StoreUnavailable, match="the store is away"):
        handle.sync()
    assert (checksums(llm), handle.version) == (bits, before)
    llm.collective_rpc(find_the_store)
    assert handle.sync() is not None


def a_flipped_bit_is_found_and_repaired(policy: Policy, llm: Any, handle: EngineHandle) -> None:
    bits = checksums(llm)
    llm.collective_rpc(flip_one_bit)
    assert handle.audit() == ("model.layers.0.mlp.down_proj.weight",)
    assert handle.version is None
    report = handle.sync()
    assert (report.version, report.full) == (policy.version, True)
    assert checksums(llm) == bits


def test_weights_of_no_checkpoint_are_loaded_by_vllm_and_then_proved(policy: Policy) -> None:
    """Dummy weights: neither the live version nor the map can be proved by what the engine has
    loaded."""
    policy.step()
    with engine(policy.checkpoint, load_format="dummy") as llm:
        dummy = checksums(llm)
        with connect(llm, store=policy.store, stream="policy") as handle:
            report = handle.sync()
            assert (report.version, report.previous, report.full) == (1, None, True)
            assert report.audit_seconds is not None
            policy.step()
            report = handle.sync()
            assert (report.version, report.full) == (2, False)
            assert handle.audit() == ()
        answered, live = answer(llm), checksums(llm)
        assert live != dummy
    with engine(policy.save("last")) as fresh:
        assert live == checksums(fresh)
        log_probabilities, tokens = answer(fresh)
        assert torch.allclose(answered[0], log_probabilities, atol=NOISE, rtol=0)
        assert answered[1] == tokens


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Policy, Any]]:
    """A policy and an engine for tests that ask little of them, each with a handle of its own."""
    policy = Policy(tmp_path_factory.mktemp("shared"))
    with engine(policy.checkpoint) as llm:
        yield policy, llm


def test_the_prefix_cache_never_answers_with_old_weights(shared: tuple[Policy, Any]) -> None:
    policy, llm = shared
    with connect(llm, store=policy.store, stream="policy") as handle:
        for _ in range(3):
            continuation(llm)
            policy.step(density=0.3)
            assert handle.sync() is not None
            cached = continuation(llm)
            llm.reset_prefix_cache()
            computed = continuation(llm)
            assert cached[1] == computed[1]
            assert torch.allclose(cached[0], computed[0], atol=NOISE, rtol=0)


def test_a_slow_link_does_not_lengthen_the_pause(shared: tuple[Policy, Any]) -> None:
    """The link stays slow: the last of those that share the engine."""
    policy, llm = shared
    with connect(llm, store=policy.store, stream="policy", follow=False) as handle:
        policy.step()
        assert handle.sync() is not None
        llm.collective_rpc(slow_down, args=(1e6 / 8,))
        policy.step(density=0.9)
        report = handle.sync()
        assert report.fetch_seconds > 7 * report.fetched_bytes / 1e6
        assert report.pause_seconds < report.fetch_seconds / 2
        assert report.fetch_seconds < report.lag_seconds < 600
