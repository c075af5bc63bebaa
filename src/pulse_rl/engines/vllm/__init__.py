"""vLLM: engines that follow a stream, and the handle that drives them (docs/vllm.md).

Installing pulse-rl next to vLLM makes the weight-transfer backend ``pulse`` known. Only what runs
inside of vLLM's own processes imports vLLM or torch: `connect` to a server needs neither.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import os
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Unpack

from ...errors import EngineError, EngineUnavailable, InputError
from ..handle import EngineHandle, InFlight, switch_together
from ..rollouts import plain
from ..transport import (
    Client,
    EngineTransport,
    Generated,
    InitInfo,
    Status,
    SubscriberOptions,
    tags_of,
)

__all__ = ["EngineHandle", "connect", "switch_together"]

_ROUTES = (
    "Start it with VLLM_SERVER_DEV_MODE=1 in its environment and "
    """--weight-transfer-config '{"backend": "pulse"}'."""
)


def connect(
    engine: Any,
    *,
    store: str,
    stream: str,
    follow: bool = True,
    in_flight: InFlight = "keep",
    audit_every: int = 100,
    timeout_seconds: float = 600.0,
    **subscriber: Unpack[SubscriberOptions],
) -> EngineHandle:
    """Follows a stream with a live vLLM, and returns the handle that moves it.

    The engine was started with the weight-transfer backend ``pulse``. If the stream has a version
    already, the engine stages it and proves that it computes with what an update writes
    (docs/vllm.md); else the first sync begins with that.

    Args:
        engine: A ``vllm.LLM``, an ``AsyncLLM`` (called from another thread than its event loop's),
            or the URL of a server.
        store: The address of the store, which the engine's own processes open.
        stream: The name of the stream.
        follow: Fetch and verify new versions while the engine generates, without being asked.
        in_flight: What becomes of requests in flight. "keep": they start over from their prompt
            with the new weights. "abort": they end. "wait": they are waited for.
        audit_every: Updates from one audit to the next. The first update is always audited.
        timeout_seconds: The limit of each wait.
        subscriber: ``base`` (the checkpoint's path; default: the engine's own model path),
            ``trusted_keys``, ``stream_id``, ``allow_recreated`` and ``cache``, as for
            `pulse_rl.Subscriber`, used on the engine's machine.

    Raises:
        InputError: An argument is not usable.
        EngineError: The engine refused a call; EngineUnavailable if it did not answer.
        ConcurrentUse: Another handle drives the engine.
        UnsupportedTensor: The engine computes with something else than an update writes, in the
            tensors or modules that are named. It follows nothing, and its weights are what they
            were.
    """
    transport = transport_to(engine, timeout_seconds)
    info = InitInfo(store, stream, follow, audit_every, **subscriber)
    return EngineHandle._on(transport, info, in_flight, timeout_seconds)


class Offline(EngineTransport):
    """A `vllm.LLM`, which generates only while it is called: there is nothing to pause."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._engine, name)(*args, **kwargs)

    def init(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._call("init_weight_transfer_engine", WeightTransferInitRequest(init_info=init_info))

    def pulse(self, action: str, owner: str, version: int | None = None) -> list[Status]:
        answers: list[Status] = self._call("collective_rpc", "pulse", args=(action, owner, version))
        return answers

    def start(self) -> None:
        self._call("start_weight_update")

    def update(self, version: int | None, owner: str) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info={"version": version, "owner": owner})
        self._call("update_weights", request)

    def finish(self, weight_version: str) -> None:
        # No tag in vLLM 0.26 and 0.27.
        tagged = inspect.signature(self._engine.finish_weight_update).parameters
        self._call("finish_weight_update", *((weight_version,) if tagged else ()))

    def generate(self, prompt: list[int], sampling: dict[str, Any]) -> Generated:
        prompts = [{"prompt_token_ids": prompt}]
        return _generated(self._engine.generate(prompts, _sampling(sampling), use_tqdm=False)[0])

    def reset_prefix_cache(self, running: bool) -> bool:
        engine: Any = getattr(self._engine, "llm_engine", None)
        if hasattr(engine, "reset_encoder_cache"):
            engine.reset_encoder_cache()  # the other forms of the engine do it in their pause
        return bool(self._call("reset_prefix_cache", running, reset_connector=True))


class Async(Offline):
    """A `vllm.AsyncLLM`, whose event loop runs in another thread than the caller's."""

    def __init__(self, engine: Any, timeout_seconds: float) -> None:
        super().__init__(engine)
        handler = getattr(engine, "output_handler", None)
        if handler is None:
            raise InputError(
                "the AsyncLLM has no event loop yet",
                hint="Make it inside of the running loop that it is to use.",
            )
        self._timeout = timeout_seconds
        self._loop: asyncio.AbstractEventLoop = handler.get_loop()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._wait(lambda: getattr(self._engine, name)(*args, **kwargs))

    def _wait(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            raise InputError(
                "the handle was called from the event loop that it waits for",
                hint="Call it in a thread: await asyncio.to_thread(handle.sync).",
            )
        try:
            return asyncio.run_coroutine_threadsafe(call(), self._loop).result(self._timeout)
        except concurrent.futures.TimeoutError:
            raise EngineUnavailable(
                f"the AsyncLLM did not answer in {self._timeout:.0f} seconds"
            ) from None

    def pause(self, mode: str) -> None:
        self._call("pause_generation", mode=mode, clear_cache=True)

    def resume(self) -> None:
        self._call("resume_generation")

    def generate(self, prompt: list[int], sampling: dict[str, Any]) -> Generated:
        async def last() -> Any:
            asked = ({"prompt_token_ids": prompt}, _sampling(sampling), uuid.uuid4().hex)
            outputs = self._engine.generate(*asked)
            return [output async for output in outputs][-1]

        return _generated(self._wait(last))


def _sampling(sampling: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**(sampling | {"logprobs": 0}))


def _generated(output: Any) -> Generated:
    """Of the one completion that a RequestOutput has."""
    found = output.outputs[0]
    tokens = list(found.token_ids)
    steps = zip(found.logprobs, tokens, strict=True)
    logprobs = [plain(step[token].logprob) for step, token in steps]
    spans = getattr(found, "weight_versions", None)  # older ones have none
    tags = None if spans is None else [(span.version, span.start) for span in spans]
    return Generated(tokens, logprobs, tags)


def require() -> Any:
    """vLLM, which logs to stderr then. Raises InputError where it is not installed."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        import vllm
    except ImportError:
        raise InputError(
            "vLLM is not installed here", hint="Give the URL of a server, as --engine."
        ) from None
    return vllm


def start(checkpoint: str) -> Any:
    """A `vllm.LLM` within this process, which answers one request at a time."""
    transfer = {"backend": "pulse"}
    return require().LLM(
        checkpoint, weight_transfer_config=transfer, enforce_eager=True, max_num_seqs=1
    )


#: What a request to ``/v1/completions`` asks for, for `completions`.
COMPLETED = {"n": 1, "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}


def completions(answer: Any) -> list[Generated]:
    """One for each prompt, in their order; the logprob is None where vLLM computed NaN."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [
        Generated(choice["token_ids"], choice["logprobs"]["token_logprobs"], None)
        for choice in choices
    ]


def transport_to(engine: Any, timeout_seconds: float) -> EngineTransport:
    """The transport to an `LLM`, an `AsyncLLM`, or a server's URL. Raises InputError."""
    if isinstance(engine, str):
        return Server(engine, timeout_seconds)
    if hasattr(engine, "pause_generation"):
        return Async(engine, timeout_seconds)
    if hasattr(engine, "init_weight_transfer_engine") and hasattr(engine, "collective_rpc"):
        return Offline(engine)
    if hasattr(engine, "generate"):
        raise EngineError(
            f"this {type(engine).__name__} has no weight transfer",
            hint="Use vLLM 0.26 or later, up to 0.33.",
        )
    raise InputError(
        f"{type(engine).__name__} is no engine",
        hint="Pass a vllm.LLM, an AsyncLLM, or a server's URL.",
    )


class Server(EngineTransport):
    """``address`` and ``timeout_seconds``: as of `Client`."""

    def __init__(self, address: str, timeout_seconds: float) -> None:
        signs = ("no attribute 'pulse'", "not configured")
        self._client = Client(address, timeout_seconds, "the backend pulse", signs, _ROUTES)
        self._call = self._client.call
        self._model = ""

    def init(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def pulse(self, action: str, owner: str, version: int | None = None) -> list[Status]:
        body = {"method": "pulse", "args": [action, owner, version]}
        answers: list[Status] = self._call("collective_rpc", body)["results"]
        return answers

    def pause(self, mode: str) -> None:
        self._call("pause", query={"mode": mode, "clear_cache": "true"})

    def resume(self) -> None:
        self._call("resume")

    def start(self) -> None:
        self._call("start_weight_update")

    def update(self, version: int | None, owner: str) -> None:
        self._call("update_weights", {"update_info": {"version": version, "owner": owner}})

    def finish(self, weight_version: str) -> None:
        self._call("finish_weight_update", {"weight_version": weight_version})

    def generate(self, prompt: list[int], sampling: dict[str, Any]) -> Generated:
        body = {"token_ids": prompt, "sampling_params": sampling | {"logprobs": 0}}
        answer = self._client.post("inference/v1/generate", body)
        if answer.status in (403, 404):  # without --enable-scale-out, or too old
            return self._completed(prompt, sampling)
        choice = self._client.read("inference/v1/generate", answer)["choices"][0]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        return Generated(choice["token_ids"], logprobs, tags_of(choice.get("weight_versions")))

    def _completed(self, prompt: list[int], sampling: dict[str, Any]) -> Generated:
        """By the route that every server has, which does not tell the weights."""
        if not self._model:
            models = self._client.read("v1/models", self._client.get("v1/models"))
            self._model = models["data"][0]["id"]
        wanted = {**sampling, "model": self._model, "prompt": [prompt], **COMPLETED}
        return completions(self._call("v1/completions", wanted))[0]

    def reset_prefix_cache(self, running: bool) -> bool:
        query = {"reset_running_requests": str(running).lower(), "reset_external": "true"}
        return bool((self._call("reset_prefix_cache", query=query) or {}).get("success", True))
