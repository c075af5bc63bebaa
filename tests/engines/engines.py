"""vLLM's engine within the test's process, and what a test asks of it."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm import LLM, SamplingParams

from .policy import PROMPT


@contextmanager
def engine(checkpoint: str, *, tensor_parallel: int = 1, **options: Any) -> Iterator[LLM]:
    """An `LLM` with the backend pulse and vLLM's defaults, but for what a small machine needs."""
    settings: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "tensor_parallel_size": tensor_parallel,
        "weight_transfer_config": {"backend": "pulse"},
    }
    llm = LLM(checkpoint, **(settings | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


class Moving:
    """An `LLM` for `connect` that calls ``between``, once, when ``after`` tokens of a generation
    are there."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.after = 0
        self.between: Callable[[], object] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, prompts: list[Any], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        engine, outputs = self._llm.llm_engine, []
        engine.add_request(uuid.uuid4().hex, prompts[0], params)
        while engine.has_unfinished_requests():
            outputs += engine.step()
            if (
                self.between is not None
                and outputs
                and len(outputs[-1].outputs[0].token_ids) >= self.after
            ):
                between, self.between = self.between, None
                between()
        return outputs[-1:]


def answer(llm: LLM, prompt: list[int] = PROMPT) -> tuple[torch.Tensor, list[int]]:
    """(log-probabilities of the prompt's tokens after the first, the next 8 tokens, greedily)."""
    sampling = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0, ignore_eos=True)
    output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
    found = [
        found[token].logprob
        for found, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    return torch.tensor(found), list(output.outputs[0].token_ids)


def continuation(llm: LLM, tokens: int = 8) -> tuple[torch.Tensor, list[int]]:
    """Log-probabilities and tokens of a greedy continuation, whose prompt the prefix cache may
    answer."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0, logprobs=0, ignore_eos=True)
    output = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    chosen = [
        step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)
    ]
    return torch.tensor(chosen), list(output.token_ids)


def checksums(llm: LLM) -> list[dict[str, str]]:
    """vLLM's own SHA-256 of every live tensor under its runtime name, by worker."""
    found: list[dict[str, str]] = llm.collective_rpc("compute_weight_checksums")
    return found
