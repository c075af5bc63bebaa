"""An engine that quantizes what it loads follows a BF16 stream: every live bit is that of a fresh
engine."""

from __future__ import annotations

import pytest
import torch

from pulse_rl import PulseError
from pulse_rl.engines.vllm import connect

from .engines import answer, checksums, engine
from .policy import Policy
from .test_llm import NOISE, break_after_first_write

#: The one of vLLM's FP8 schemes whose kernels its CPU build has for every CPU.
SCHEME = "fp8_per_channel"


@pytest.mark.parametrize("tensor_parallel", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_fp8_weights_are_derived_again_from_the_stream(
    policy: Policy, tensor_parallel: int
) -> None:
    options = {"quantization": SCHEME, "tensor_parallel": tensor_parallel}
    with engine(policy.checkpoint, **options) as llm:
        with connect(llm, store=policy.store, stream="policy") as handle:
            for number in range(1, 6):
                policy.step(density=0.01 if number % 2 else 0.3)
                report = handle.sync()
                assert (report.version, report.previous, report.full) == (number, number - 1, False)
            bits = checksums(llm)
            policy.step()
            llm.collective_rpc(break_after_first_write)
            with pytest.raises(PulseError, match="the device is lost"):
                handle.sync()
            assert checksums(llm) == bits
            assert handle.version == 5
            assert handle.audit() == ()
            assert handle.version == policy.version, (
                "what is quantized is audited at the newest version"
            )
        answered, live = answer(llm), checksums(llm)
    with engine(policy.save("last"), **options) as fresh:
        assert live == checksums(fresh)
        log_probabilities, tokens = answer(fresh)
        assert torch.allclose(answered[0], log_probabilities, atol=NOISE, rtol=0)
        assert answered[1] == tokens


@pytest.mark.slow
def test_dummy_weights_are_quantized_by_vllm_and_then_proved(policy: Policy) -> None:
    policy.step()
    with engine(policy.checkpoint, quantization=SCHEME, load_format="dummy") as llm:
        with connect(llm, store=policy.store, stream="policy") as handle:
            report = handle.sync()
            assert (report.version, report.full) == (1, True)
            policy.step()
            report = handle.sync()
            assert (report.version, report.full) == (2, False)
            assert handle.audit() == ()
        live = checksums(llm)
    with engine(policy.save("last"), quantization=SCHEME) as fresh:
        assert live == checksums(fresh)
