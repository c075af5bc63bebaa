"""A vLLM server, by its weight routes (``VLLM_SERVER_DEV_MODE=1``)."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from ...errors import EngineError
from ..engines.http import Answer, Client
from ..engines.transport import Status

_ROUTES = (
    "Start it with VLLM_SERVER_DEV_MODE=1 in its environment and "
    """--weight-transfer-config '{"backend": "pulse"}'."""
)


class Server:
    """``address`` and ``timeout_seconds``: as of `Client`."""

    def __init__(self, address: str, timeout_seconds: float) -> None:
        self._client = Client(address, timeout_seconds)

    def init(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def pulse(self, action: str, owner: str, version: int | None = None) -> list[Status]:
        body = {"method": "pulse", "args": [action, owner, version]}
        answers: list[Status] = self._post("collective_rpc", body)["results"]
        return answers

    def recover(self) -> None:
        self.resume()

    def pause(self, mode: str) -> None:
        self._post("pause", query={"mode": mode, "clear_cache": "true"})

    def resume(self) -> None:
        self._post("resume")

    def start(self) -> None:
        self._post("start_weight_update")

    def update(self, version: int | None, owner: str) -> None:
        self._post("update_weights", {"update_info": {"version": version, "owner": owner}})

    def finish(self, weight_version: str) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version})

    def reset_prefix_cache(self, running: bool) -> bool:
        query = {"reset_running_requests": str(running).lower(), "reset_external": "true"}
        return bool((self._post("reset_prefix_cache", query=query) or {}).get("success", True))

    def _post(self, route: str, body: object = None, query: dict[str, str] | None = None) -> Any:
        answer = self._client.post(route + (f"?{urlencode(query)}" if query else ""), body)
        if answer.status >= 300:
            raise _refused(self._client.address, route, answer)
        return answer.json() if answer.body else None


def _refused(address: str, route: str, answer: Answer) -> EngineError:
    if answer.status in (404, 405):
        return EngineError(f"{address} has no route /{route}", hint=_ROUTES)
    if "no attribute 'pulse'" in answer.words or "not configured" in answer.words:
        return EngineError(f"the engine at {address} was not started with the backend pulse", hint=_ROUTES)
    return EngineError(f"{address} refused /{route} ({answer.status}): {answer.words}")
