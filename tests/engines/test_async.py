"""An AsyncLLM is driven from another thread than its loop's, beside requests in flight, which carry
their versions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from pulse_rl.engines.handle import InFlight
from pulse_rl.engines.vllm import EngineHandle, connect
from pulse_rl.errors import InputError

from .policy import PROMPT, Policy


@contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def made(checkpoint: str) -> AsyncLLM:
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            checkpoint,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            weight_transfer_config={"backend": "pulse"},  # type: ignore[arg-type]
        )
    )


async def generated(engine: AsyncLLM, name: str, started: threading.Event, tokens: int) -> Any:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    output = None
    async for output in engine.generate({"prompt_token_ids": PROMPT}, sampling, request_id=name):  # noqa: B007
        started.set()
    return output


def test_requests_in_flight_are_kept_awaited_or_aborted(policy: Policy) -> None:
    with loop_in_a_thread() as loop:
        engine = asyncio.run_coroutine_threadsafe(made(policy.checkpoint), loop).result()
        before = str(
            policy.version
        )  # it was started from the checkpoint of a version, and tagged so
        for mode in get_args(InFlight):
            with connect(engine, store=policy.store, stream="policy", in_flight=mode) as handle:
                one_update(policy, engine, loop, handle, mode, before)
            before = str(policy.version)
        loop.call_soon_threadsafe(engine.shutdown)


def one_update(
    policy: Policy,
    engine: AsyncLLM,
    loop: asyncio.AbstractEventLoop,
    handle: EngineHandle,
    mode: InFlight,
    before: str,
) -> None:
    """``before``: the tag of what is generated until then."""
    now = str(policy.step())
    started = threading.Event()
    running = asyncio.run_coroutine_threadsafe(
        generated(engine, f"{mode}, first", started, 150), loop
    )
    assert started.wait(60)
    done = handle.sync()
    assert str(done.version) == now
    first = running.result(60).outputs[0]
    after = asyncio.run_coroutine_threadsafe(
        generated(engine, f"{mode}, second", started, 4), loop
    ).result(60)
    assert [span.version for span in after.outputs[0].weight_versions] == [now]
    assert (len(first.token_ids) == 150) == (mode != "abort")
    assert [span.version for span in first.weight_versions] == (
        [before, now] if mode == "keep" else [before]
    )

    async def from_the_loop() -> None:
        handle.sync()

    with pytest.raises(InputError, match="event loop"):
        asyncio.run_coroutine_threadsafe(from_the_loop(), loop).result()
