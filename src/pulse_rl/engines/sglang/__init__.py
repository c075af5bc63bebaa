"""SGLang: servers that follow a stream, and the handle that drives them (docs/sglang.md).

Installing pulse-rl next to SGLang makes its plugin ``pulse`` known; `load` is the custom weight
loader. Only what runs inside of SGLang's own processes imports SGLang or torch: `connect` needs
neither.
"""

from __future__ import annotations

import base64
import json
import pickle
from contextlib import suppress
from typing import Any, Unpack

from ...errors import EngineError
from ..handle import EngineHandle, InFlight, switch_together
from ..transport import (
    Client,
    EngineTransport,
    Generated,
    InitInfo,
    Status,
    SubscriberOptions,
    raise_for_status,
    tags_of,
)

__all__ = ["EngineHandle", "connect", "switch_together"]

#: The ``load_format`` of an update, and the value of ``--custom-weight-loader``.
LOADER = "pulse_rl.engines.sglang.load"
#: The action of ``/weights_checker`` that the plugin answers.
ACTION = "pulse"
_START = (
    f"Install pulse-rl next to SGLang 0.5.23, and start it with --custom-weight-loader {LOADER}."
)
_NO_TENSORS = base64.b64encode(pickle.dumps([], protocol=2)).decode()
_MODES = {"keep": "retract", "abort": "abort"}


def load(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Moves the live parameters of ``model`` to the version that is staged. Called by SGLang, in
    every worker, for ``/update_weights_from_tensor`` with this function's name as ``load_format``;
    ``named_tensors`` is empty.

    Never raises: an error in a worker ends SGLang's server. The plugin lets the request answer with
    it instead.
    """
    from .plugin import update

    update(model, named_tensors)


def connect(
    url: str,
    *,
    store: str,
    stream: str,
    follow: bool = True,
    in_flight: InFlight = "keep",
    audit_every: int = 100,
    timeout_seconds: float = 600.0,
    **subscriber: Unpack[SubscriberOptions],
) -> EngineHandle:
    """Follows a stream with a live SGLang server, and returns the handle that moves it.

    The server was started with ``--custom-weight-loader pulse_rl.engines.sglang.load``. If the
    stream has a version already, the server stages it and proves that it computes with what an
    update writes (docs/sglang.md); else the first sync begins with that.

    Args:
        url: The server's URL.
        store: The address of the store, which the server's own processes open.
        stream: The name of the stream.
        follow: Fetch and verify new versions while the server generates, without being asked.
        in_flight: What becomes of requests in flight. "keep": they start over from their prompt
            with the new weights. "abort": they end. "wait": they are waited for, and new ones wait.
        audit_every: Updates from one audit to the next. The first update is always audited.
        timeout_seconds: The limit of each wait.
        subscriber: ``base`` (the checkpoint's path; default: the engine's own model path),
            ``trusted_keys``, ``stream_id``, ``allow_recreated`` and ``cache``, as for
            `pulse_rl.Subscriber`, used on the server's machine.

    Raises:
        InputError: An argument is not usable.
        EngineError: The server refused a call; EngineUnavailable if it did not answer.
        ConcurrentUse: Another handle drives the server.
        UnsupportedTensor: The server does not compute with the checkpoint that it was started from.
    """
    info = InitInfo(store, stream, follow, audit_every, **subscriber)
    return EngineHandle._on(Server(url, timeout_seconds), info, in_flight, timeout_seconds)


class Server(EngineTransport):
    """``address`` and ``timeout_seconds``: as of `Client`."""

    def __init__(self, address: str, timeout_seconds: float) -> None:
        signs = (f"action='{ACTION}'",)
        self._client = Client(address, timeout_seconds, "the plugin pulse", signs, _START)
        self._call = self._client.call
        self._owner = ""
        self._workers = 1
        self._live: int | None = None
        self._paused = False
        self._flushed = False

    def init(self, init_info: dict[str, Any]) -> None:
        self._owner = init_info["owner"]
        raise_for_status("failure", self._control({"action": "open", "init_info": init_info}))

    def pulse(self, action: str, owner: str, version: int | None = None) -> list[Status]:
        return self._control({"action": action, "owner": owner, "version": version})

    def recover(self) -> None:
        with suppress(EngineError):
            self._call("end_weight_update", {})
        self._paused = True
        self.resume()

    def pause(self, mode: str) -> None:
        if mode in _MODES:  # else each call for an update waits for the requests in flight
            self._pause(_MODES[mode])

    def resume(self) -> None:
        if self._paused:
            self._call("continue_generation", {"torch_empty_cache": False})
            self._paused = False

    def start(self) -> None:
        body = {"selector": "target"}
        try:
            self._call("begin_weight_update", body)
        except EngineError:  # left open by a handle that died
            self._call("end_weight_update", {})
            self._call("begin_weight_update", body)

    def update(self, version: int | None, owner: str) -> None:
        body = {
            "serialized_named_tensors": [_NO_TENSORS] * self._workers,
            "load_format": LOADER,
            "selector": "target",
            "flush_cache": True,
        }
        self._flushed, before = False, self._live
        try:
            self._call("update_weights_from_tensor", body)
            self._flushed = True
        except EngineError:
            failed = any(status.get("failed") for status in self.pulse("status", self._owner))
            if failed or self._live == before:
                with suppress(EngineError):
                    self._call("end_weight_update", {})
                raise
            # The weights are written, and SGLang refused to flush its cache: see
            # `reset_prefix_cache`.

    def finish(self, weight_version: str) -> None:
        self._call("end_weight_update", {})
        self.tag(weight_version)

    def tag(self, weight_version: str) -> None:
        body = {"new_version": weight_version, "abort_all_requests": False}
        self._call("update_weight_version", body)

    def generate(self, prompt: list[int], sampling: dict[str, Any]) -> Generated:
        names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
        params = sampling | {names[name]: sampling[name] for name in names if name in sampling}
        params = {name: value for name, value in params.items() if name not in names}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        meta = self._call("generate", body)["meta_info"]
        found = meta["output_token_logprobs"]
        tokens, logprobs = [token for _, token, *_ in found], [logprob for logprob, *_ in found]
        return Generated(tokens, logprobs, tags_of(meta.get("weight_versions")))

    def reset_prefix_cache(self, running: bool) -> bool:
        if self._flushed and not running:
            self._flushed = False
            return True
        if running:
            self._pause("retract")
        return self._client.post("flush_cache").status < 400

    def _pause(self, mode: str) -> None:
        self._paused = True
        self._call("pause_generation", {"mode": mode})

    def _control(self, asked: dict[str, Any]) -> list[Status]:
        body = {"action": ACTION, "skip_tensor_list": [json.dumps(asked)]}
        answer = self._call("weights_checker", body)
        try:
            statuses: list[Status] = json.loads(answer["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise EngineError(
                f"{self._client.address} answered without a status", hint=_START
            ) from None
        self._workers = len(statuses)
        self._live = next((status["version"] for status in statuses if status.get("leader")), None)
        return statuses


def is_sglang(address: str, timeout_seconds: float) -> bool:
    """Whether an SGLang server answers at ``address``. Raises EngineUnavailable without an
    answer."""
    answer = Client(address, timeout_seconds).get("model_info")
    try:
        return answer.status == 200 and "weight_version" in json.loads(answer.body)
    except (ValueError, RecursionError):
        return False
