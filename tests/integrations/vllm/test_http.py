"""What of vLLM is used: the routes of a server and what its refusals become, and its options."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pulse_rl.engines.vllm import Server
from pulse_rl.engines.vllm.plugin import require_fixed_places
from pulse_rl.errors import EngineError, EngineUnavailable
from tests.support.http import serving_json


class Answers:
    """What a server was asked, and its answers by path; {} where there is none."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.seen.append((path, body))
        return self.answers.get(path.partition("?")[0], (200, {}))


@pytest.fixture
def handler() -> Iterator[tuple[Answers, Server]]:
    made = Answers()
    with serving_json(made.answer) as url:
        yield made, Server(f"{url}/", 5.0)


def test_the_calls_are_those_of_the_routes(handler: tuple[Answers, Server]) -> None:
    kind, server = handler
    kind.answers["/collective_rpc"] = (200, {"results": [{"open": True}]})
    kind.answers["/reset_prefix_cache"] = (200, {"success": False})
    server.init({"store": "s"})
    assert server.pulse("stage", "me", 3) == [{"open": True}]
    server.pause("keep")
    server.start()
    server.update(None, "me")
    server.finish("3")
    assert server.reset_prefix_cache(True) is False
    server.resume()
    assert kind.seen == [
        ("/init_weight_transfer_engine", {"init_info": {"store": "s"}}),
        ("/collective_rpc", {"method": "pulse", "args": ["stage", "me", 3]}),
        ("/pause?mode=keep&clear_cache=true", None),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"version": None, "owner": "me"}}),
        ("/finish_weight_update", {"weight_version": "3"}),
        ("/reset_prefix_cache?reset_running_requests=true&reset_external=true", None),
        ("/resume", None),
    ]


@pytest.mark.parametrize(
    ("status", "answer", "words", "hint"),
    [
        (404, {"detail": "Not Found"}, "no route /resume", "VLLM_SERVER_DEV_MODE=1"),
        (
            500,
            {"error": {"message": "'Worker' object has no attribute 'pulse'"}},
            "backend pulse",
            "weight-transfer",
        ),
        (500, {"error": "boom\n\nand more"}, "refused /resume .500.: boom and more", ""),
        (502, b"<html>", "refused /resume .502.: <html>", ""),
    ],
)
def test_refusals_are_one_line(
    handler: tuple[Answers, Server], status: int, answer: object, words: str, hint: str
) -> None:
    kind, server = handler
    kind.answers["/resume"] = (status, answer)
    with pytest.raises(EngineError, match=words) as refusal:
        server.resume()
    assert hint in refusal.value.hint
    assert "\n" not in str(refusal.value)


def test_a_server_that_is_not_there_may_come_back() -> None:
    with pytest.raises(EngineUnavailable, match="no answer") as refusal:
        Server("http://127.0.0.1:1", 1.0).resume()
    assert refusal.value.retryable


def test_a_server_that_sends_elsewhere_or_speaks_no_json_is_told(
    handler: tuple[Answers, Server],
) -> None:
    """A redirected POST would arrive as a GET, and look like a route that is missing."""
    kind, server = handler
    kind.answers["/resume"] = (307, {"location": "elsewhere"})
    with pytest.raises(EngineError, match=r"refused /resume \(307\)"):
        server.resume()
    kind.answers["/resume"] = (200, b"<html>")
    with pytest.raises(EngineError, match="something else than JSON: '<html>'"):
        server.resume()


def test_what_moves_weights_is_refused() -> None:
    def config(group: int = 0, **changes: object) -> SimpleNamespace:
        parallel = SimpleNamespace(enable_eplb=False, enable_elastic_ep=False)
        offload = SimpleNamespace(
            offload_backend="auto", prefetch=SimpleNamespace(offload_group_size=group)
        )
        facts = {"parallel_config": parallel, "offload_config": offload, "lora_config": None}
        return SimpleNamespace(**(facts | changes))

    require_fixed_places(config())
    refused = {
        "enable-eplb": config(parallel_config=SimpleNamespace(enable_eplb=True)),
        "enable-elastic-ep": config(parallel_config=SimpleNamespace(enable_elastic_ep=True)),
        "offload-group-size": config(group=2),
        "enable-lora": config(lora_config=object()),
    }
    for option, found in refused.items():
        with pytest.raises(EngineError, match=option):
            require_fixed_places(found)


def test_generations_tell_their_weights_where_the_server_does(
    handler: tuple[Answers, Server],
) -> None:
    kind, server = handler
    tokens = {"content": [{"logprob": -0.5}, {"logprob": -1.5}]}
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    choice = {"token_ids": [7, 8], "logprobs": tokens, "weight_versions": spans}
    kind.answers["/inference/v1/generate"] = (200, {"choices": [choice]})
    assert server.generate([1], {"max_tokens": 2, "seed": 5}) == (
        [7, 8],
        [-0.5, -1.5],
        [("3", 0), ("4", 1)],
    )
    assert kind.seen[-1][1] == {
        "token_ids": [1],
        "sampling_params": {"max_tokens": 2, "seed": 5, "logprobs": 0},
    }
    kind.answers["/inference/v1/generate"] = (403, {"error": "disabled"})
    kind.answers["/v1/models"] = (200, {"data": [{"id": "policy"}]})
    plain = {"index": 0, "token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}}
    kind.answers["/v1/completions"] = (200, {"choices": [plain]})
    assert server.generate([1], {"max_tokens": 1}) == ([7], [-0.5], None)
    assert kind.seen[-1][1]["model"] == "policy"
