"""A vLLM server, by its weight routes (``VLLM_SERVER_DEV_MODE=1``)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urlencode, urlsplit

from ...errors import EngineError, EngineUnavailable, InputError
from ..engines.transport import Status

_ROUTES = (
    "Start it with VLLM_SERVER_DEV_MODE=1 in its environment and "
    """--weight-transfer-config '{"backend": "pulse"}'."""
)
_MOST_WORDS = 400


class Server:
    """``address``: the server's URL, without a path. ``timeout_seconds`` holds for each call."""

    def __init__(self, address: str, timeout_seconds: float) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InputError(f"{address!r} is no URL of a server", hint="Give it as http://host:port.")
        self.address = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._timeout = timeout_seconds

    def init(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def pulse(self, action: str, owner: str, version: int | None = None) -> list[Status]:
        body = {"method": "pulse", "args": [action, owner, version]}
        answers: list[Status] = self._post("collective_rpc", body)["results"]
        return answers

    def pause(self, mode: str) -> None:
        self._post("pause", query={"mode": mode, "clear_cache": "true"})

    def resume(self) -> None:
        self._post("resume")

    def start(self) -> None:
        self._post("start_weight_update")

    def update(self, version: int | None) -> None:
        self._post("update_weights", {"update_info": {"version": version}})

    def finish(self, weight_version: str) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version})

    def reset_prefix_cache(self, running: bool) -> bool:
        query = {"reset_running_requests": str(running).lower(), "reset_external": "true"}
        return bool((self._post("reset_prefix_cache", query=query) or {}).get("success", True))

    def _post(self, route: str, body: object = None, query: dict[str, str] | None = None) -> Any:
        url = f"{self.address}/{route}" + (f"?{urlencode(query)}" if query else "")
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(self.address, route, error.code, error.read()) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise EngineUnavailable(f"no answer from {self.address}: {reason}") from None
        return json.loads(text) if text else None


def _refused(address: str, route: str, status: int, body: bytes) -> EngineError:
    if status in (404, 405):
        return EngineError(f"{address} has no route /{route}", hint=_ROUTES)
    try:
        answer = json.loads(body)
        message = answer["error"]["message"] if isinstance(answer.get("error"), dict) else answer.get("error", answer)
    except (ValueError, KeyError, AttributeError):
        message = body.decode(errors="replace")
    words = " ".join(str(message).split())[:_MOST_WORDS]
    if "no attribute 'pulse'" in words or "not configured" in words:
        return EngineError(f"the engine at {address} was not started with the backend pulse", hint=_ROUTES)
    return EngineError(f"{address} refused /{route} ({status}): {words}")
