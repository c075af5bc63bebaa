"""The rollouts as TRL asks for them, without TRL: when weights are published, and what the server
is asked."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl import Subscriber
from pulse_rl.engines.rollouts import Rollout
from pulse_rl.errors import EngineUnavailable, InputError
from pulse_rl.frameworks.trl import PulseRollout, pulse_rollout
from tests.support.states import present

from .server import PretendedServer

pytestmark = pytest.mark.slow  # it imports transformers


class Words:
    """A tokenizer: a token for each character, the template's first."""

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(c) for c in row] for row in text]}

    def apply_chat_template(
        self, conversation: list[Any], **options: Any
    ) -> dict[str, list[list[int]]]:
        assert options["add_generation_prompt"]
        assert options["tokenize"]
        return {
            "input_ids": [
                [1, *self([prompt[0]["content"]])["input_ids"][0]] for prompt in conversation
            ]
        }


def trainer() -> Any:
    """What of GRPOTrainer is used."""
    model = nn.Linear(40, 50)
    args = SimpleNamespace(learning_rate=1e-6, generation_kwargs={"seed": 3})
    return SimpleNamespace(
        model=model,
        args=args,
        optimizer=None,
        is_in_train=True,
        state=SimpleNamespace(global_step=0, epoch=0.0, is_world_process_zero=True, log_history=[]),
        callback_handler=SimpleNamespace(callbacks=[]),
        accelerator=SimpleNamespace(num_processes=1),
        processing_class=Words(),
        max_completion_length=9,
        temperature=0.7,
        top_p=0.9,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        tools=None,
        chat_template=None,
        chat_template_kwargs={},
    )


def ended(rollout: PulseRollout, made: Any) -> None:
    rollout.on_train_end(made.args, made.state, None, model=made.model)  # type: ignore[arg-type]


def test_a_version_a_step_and_a_completion_a_prompt(
    server: PretendedServer, tmp_path: Path
) -> None:
    made, rollout = trainer(), pulse_rollout(server.url, str(tmp_path), "policy")
    found = rollout(["ab", "c"], made)
    assert found == {
        "prompt_ids": [[97, 98], [99]],
        "completion_ids": [[0, 7], [1, 7]],
        "logprobs": [[-0.5, None], [-0.5, None]],
    }
    asked = server.requests[-1]
    assert asked["prompt"] == [[97, 98], [99]]
    settings = {
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 3,
        "n": 1,
    }
    assert settings.items() <= asked.items()
    assert asked["model"] == "policy"
    rollout(["ab"], made)  # the same step: an evaluation, say
    assert rollout.published is not None
    assert rollout.published.version == 0
    made.state.global_step = 1
    with torch.no_grad():
        made.model.weight[0] += 1
    rollout([[{"role": "user", "content": "ab"}]], made)
    assert server.requests[-1]["prompt"] == [[1, 97, 98]]
    assert made.callback_handler.callbacks == [rollout]
    logs: dict[str, Any] = {}
    rollout.on_log(made.args, made.state, None, logs=logs)  # type: ignore[arg-type]
    assert logs["pulse/version"] == 1
    assert 0 < logs["pulse/density"] < 0.1
    assert logs.keys() == {"pulse/version", "pulse/density", "pulse/bytes", "pulse/pause_seconds"}
    made.state.global_step = 2
    ended(rollout, made)
    assert server.tag == "2"
    assert server.handle.closed
    update = present(Subscriber(str(tmp_path), stream="policy").sync())
    assert update.metadata == {"step": 2, "epoch": 0.0}


def test_a_restarted_server_generates_nothing_before_it_has_caught_up(
    server: PretendedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, rollout = trainer(), pulse_rollout(server.url, str(tmp_path), "policy")
    rollout(["a"], made)
    answer, looks = server.answer, []

    def restarted(route: str, body: dict[str, Any]) -> Any:
        if route == "weight_info":
            looks.append(route)
            server.tag = "default" if len(looks) < 3 else "0"
        assert route != "v1/completions" or server.tag == "0"
        return answer(route, body)

    monkeypatch.setattr(server, "answer", restarted)
    assert rollout(["a"], made)["completion_ids"] == [[0, 7]]
    assert len(looks) == 4, "two until it has caught up, one before and one after"
    ended(rollout, made)
    assert rollout.published is not None
    assert rollout.published.version == 0  # the step's weights were published for its rollouts


def test_an_evaluation_outside_of_a_training_leaves_nothing_open(
    server: PretendedServer, tmp_path: Path
) -> None:
    made, rollout = trainer(), pulse_rollout(server.url, str(tmp_path), "policy")

    def evaluated() -> bool:
        rollout(["a"], made)
        rollout.on_evaluate(made.args, made.state, None)  # type: ignore[arg-type]
        return server.handle.closed

    assert not evaluated(), "the training goes on"
    ended(rollout, made)
    made.is_in_train = False
    with torch.no_grad():  # other weights than those that the training has ended with
        made.model.weight.zero_()
    assert evaluated()
    worker = Subscriber(str(tmp_path), stream="policy")
    worker.sync()
    assert not worker.state.read("weight").any()
    made.is_in_train = True
    made.state.global_step = 1
    assert not evaluated()
    ended(rollout, made)


def test_at_the_end_an_error_is_said_and_nothing_is_lost(
    server: PretendedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer()
    rollout = pulse_rollout(server.url, str(tmp_path), "policy", retry_seconds=3600)
    rollout(["a"], made)
    server.errors = [EngineUnavailable("gone")] * 9
    made.state.global_step = 1
    ended(rollout, made)
    (said,) = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert "step 1" in said
    assert "gone" in said
    assert len(server.errors) == 8


def test_what_it_cannot_ask_for_is_refused(server: PretendedServer, tmp_path: Path) -> None:
    made, rollout = trainer(), pulse_rollout(server.url, str(tmp_path), "policy")
    picture = [{"role": "user", "content": [{"type": "image", "image": None}]}]
    with pytest.raises(InputError, match="text only"):
        rollout([picture], made)
    made.environment_factories = {"game": object}
    with pytest.raises(InputError, match="environments"):
        rollout([[{"role": "user", "content": "a"}]], made)
    ended(rollout, made)


def test_a_learning_rate_that_will_disappoint_is_said_before_the_first_step(
    server: PretendedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, rollout = trainer(), pulse_rollout(server.url, str(tmp_path), "policy")
    made.args.learning_rate = 0.1
    rollout(["a"], made)
    assert any("learning rate 0.1" in r.message for r in caplog.records)
    ended(rollout, made)


@pytest.mark.parametrize("seed", [3, None])
def test_each_completion_is_recorded_with_its_weights_and_seed(
    server: PretendedServer, tmp_path: Path, seed: int | None
) -> None:
    made, records = trainer(), tmp_path / "r.jsonl"
    made.args.generation_kwargs = {} if seed is None else {"seed": seed}
    rollout = pulse_rollout(server.url, str(tmp_path / "store"), "policy", records=records)
    rollout(["a", "a"], made)
    made.state.global_step = 1
    with torch.no_grad():
        made.model.weight += 1
    rollout(["b"], made)
    found = list(Rollout.read(records))
    assert [each.metadata for each in found] == [{"step": 0}, {"step": 0}, {"step": 1}]
    assert [each.weights[0].version for each in found] == [0, 0, 1]
    assert found[2].weights[0].root == rollout.published.root if rollout.published else False
    assert [each.prompt_token_ids for each in found] == [(97,), (97,), (98,)]
    assert found[0].token_ids == (0, 7)
    assert found[0].logprobs == (-0.5, None)
    assert found[0].engine_version == "0.32.0"
    assert "seed" not in found[0].sampling
    assert sorted(request["seed"] for request in server.requests) == sorted(
        each.seed or 0 for each in found
    )
    assert len({each.seed for each in found}) == (1 if seed else 3), (
        "with one seed both of a prompt would be the same"
    )
