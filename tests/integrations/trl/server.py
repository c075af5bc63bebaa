"""A vLLM server that plays its part: the routes that a trainer reads, by HTTP, and a handle on
it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pulse_rl import PulseError, Subscriber
from pulse_rl.engines.handle import EngineSync
from tests.support.http import serving_json


class PretendedServer:
    """``dtype`` is torch's name of what it computes in; ``tag`` its weight version. ``errors`` are
    raised one after another by the handle's syncs, ``refusals`` answered by the server, before what
    is asked is done. ``handle`` is the last one that was made."""

    handle: Handle

    def __init__(self) -> None:
        self.dtype = "torch.bfloat16"
        self.tag = "default"
        self.errors: list[PulseError] = []
        self.refusals: list[int] = []
        self.requests: list[dict[str, Any]] = []
        self.url = ""

    def answer(self, route: str, body: dict[str, Any]) -> Any:
        if route.startswith("server_info"):
            return {"vllm_config": {"model_config": {"dtype": self.dtype}}}
        if route == "weight_info":
            return {"weight_version": self.tag}
        if route == "version":
            return {"version": "0.32.0"}
        if route == "v1/models":
            return {"data": [{"id": "policy"}]}
        self.requests.append(body)
        choices = [
            {"index": n, "token_ids": [n, 7], "logprobs": {"token_logprobs": [-0.5, None]}}
            for n in range(len(body["prompt"]))
        ]
        return {"choices": choices[::-1]}

    def connect(self, url: str, **options: Any) -> Handle:
        assert url == self.url
        self.handle = Handle(self, options)
        return self.handle


class Handle:
    def __init__(self, server: PretendedServer, options: dict[str, Any]) -> None:
        self.server, self.options = server, options
        self.subscriber = Subscriber(options["store"], stream=options["stream"])
        self.followed = self.closed = False

    def follow(self, **_: Any) -> None:
        self.followed = True

    def sync(self) -> EngineSync | None:
        if self.server.errors:
            raise self.server.errors.pop(0)
        previous = self.subscriber.version
        update = self.subscriber.sync()
        if update is None:
            return None
        update.acknowledge()
        self.server.tag = str(update.version)
        took = (False, 0.1, 0.1, None, 0.0, 0.0, 1, None)
        return EngineSync(update.version, previous, update.root, update.metadata, *took)

    def close(self) -> None:
        self.closed = True


@contextmanager
def listening(server: PretendedServer) -> Iterator[PretendedServer]:
    def answer(path: str, body: Any) -> tuple[int, Any]:
        if server.refusals:
            return server.refusals.pop(0), {"error": "no"}
        return 200, server.answer(path[1:], body or {})

    with serving_json(answer) as server.url:
        yield server
