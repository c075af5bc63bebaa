"""What could keep old weights, or lose them: sleep, loaders beside the stream, drafts, compiled
code, adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pulse_rl.engines.vllm import connect
from pulse_rl.errors import EngineError, EngineUnavailable

from .engines import answer, checksums, engine
from .policy import Policy


def lose(worker: Any) -> None:
    """What level 2 of sleep does to weights on a GPU; vLLM's sleep on a CPU does nothing."""
    for weight in worker.get_model().parameters():
        weight.data.fill_(float("nan"))


@pytest.mark.parametrize("tensor_parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_that_sleep_and_reloading_take_away_are_written_again(
    policy: Policy, tensor_parallel: int
) -> None:
    with (
        engine(policy.checkpoint, tensor_parallel=tensor_parallel) as llm,
        connect(llm, store=policy.store, stream="policy") as handle,
    ):
        policy.step()
        assert handle.sync() is not None
        bits = checksums(llm)
        # 1. Level 1 keeps the weights: there is nothing to do, and no word of it while they are
        # away.
        llm.sleep(level=1)
        with pytest.raises(EngineUnavailable, match="sleeps"):
            handle.sync()
        with pytest.raises(EngineUnavailable, match="sleeps"):
            handle.audit()
        llm.wake_up()
        assert (handle.sync(), handle.version) == (None, 1)
        # 2. Level 2 loses them. They are written while the cache of keys still sleeps.
        llm.sleep(level=2)
        llm.collective_rpc(lose)
        llm.wake_up(tags=["weights"])
        report = handle.sync()
        assert (report.version, report.full, checksums(llm)) == (1, True, bits)
        assert llm.llm_engine.is_sleeping()
        llm.wake_up(tags=["kv_cache"])
        followed = answer(llm)
        # 3. vLLM's own loader brings the checkpoint's back.
        llm.collective_rpc("reload_weights")
        assert handle.version is None
        assert checksums(llm) != bits
        report = handle.sync()
        assert (report.version, report.full, checksums(llm)) == (1, True, bits)
        assert torch.equal(answer(llm)[0], followed[0])


@pytest.mark.slow
def test_a_draft_of_its_own_never_changes_what_is_answered(policy: Policy) -> None:
    options = {"method": "draft_model", "model": policy.checkpoint, "num_speculative_tokens": 2}
    with engine(policy.checkpoint, speculative_config=options) as llm:
        with connect(llm, store=policy.store, stream="policy") as handle:
            for density in (0.02, 0.9):
                policy.step(density)
                assert handle.sync() is not None
        followed = answer(llm)
    with engine(policy.save("last")) as llm:
        assert followed[1] == answer(llm)[1]


REFUSED: dict[str, dict[str, Any]] = {
    "wraps its layers for adapters": {"enable_lora": True, "max_lora_rank": 8},
    "computed in ExampleConnector, which cannot be emptied": {
        "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", REFUSED)
def test_what_would_keep_old_weights_is_refused(policy: Policy, reason: str) -> None:
    with (
        engine(policy.checkpoint, **REFUSED[reason]) as llm,
        pytest.raises(EngineError, match=reason),
        connect(llm, store=policy.store, stream="policy"),
    ):
        pass
