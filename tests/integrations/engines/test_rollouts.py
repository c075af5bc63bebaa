"""Rollout records: what generates them knows their weights; what replays them finds every bit that
is another one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pulse_rl.engines.handle import EngineHandle
from pulse_rl.engines.rollouts import Rollout, Weights
from pulse_rl.engines.transport import Generated, InitInfo
from pulse_rl.errors import EngineError, InputError, StateMismatch

from .test_handle import Engine

PROMPT = [3, 1, 4, 1, 5]
GREEDY = {"temperature": 0, "max_tokens": 4}


def root(version: int | None) -> str:
    return f"{version:064x}"


class Generating(Engine):
    """Each token is a function of the weights, the seed, and all tokens before. ``moves``: the
    versions that become live before the token of an index. ``tells``: whether the engine says which
    weights generated what."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: dict[int, int] = {}
        self.tells = True
        self.off = 0.0
        self.requests: list[dict[str, Any]] = []
        self.handle = EngineHandle._on(self, InitInfo("s", "policy"), "keep", 5.0)

    def pulse(self, action: str, owner: str, version: int | None = None) -> list[dict[str, Any]]:
        if action == "stage" and version is not None and version >= (self.live or 0):
            self.newest = version
        (status,) = super().pulse(action, owner, version)
        return [status | {"root": root(self.live or 0)}]

    def generate(self, prompt: list[int], sampling: dict[str, Any]) -> Generated:
        self.requests.append(sampling)
        tokens: list[int] = []
        logprobs: list[float | None] = []
        tags: list[tuple[str, int]] = []
        moves, self.moves = self.moves, {}
        for index in range(sampling["max_tokens"]):
            if index in moves:
                self.handle.sync(moves[index])
            if not tags or tags[-1][0] != str(self.live):
                tags.append((str(self.live), index))
            drawn = hash((self.live, sampling.get("seed"), *prompt, *tokens))
            tokens.append(drawn % 97)
            logprobs.append(-1.0 / (1 + drawn % 89) + self.off)
        return Generated(tokens, logprobs, tags if self.tells else None)


@pytest.fixture
def engine() -> Generating:
    return Generating()


def test_a_record_has_the_weights_of_each_token(engine: Generating, tmp_path: Path) -> None:
    engine.moves = {2: 4}
    made = engine.handle.generate(PROMPT, {**GREEDY, "top_p": None})
    assert made.weights == (Weights(0, root(0), 0), Weights(4, root(4), 2))
    assert (made.engine, made.engine_version, made.seed) == ("vllm", "0.32", None)
    assert made.sampling == GREEDY
    for _ in range(2):
        made.append(tmp_path / "r.jsonl")
    assert list(Rollout.read(tmp_path / "r.jsonl")) == [made, made]


def test_what_is_sampled_gets_a_seed_that_is_noted(engine: Generating) -> None:
    made = engine.handle.generate(PROMPT, {"max_tokens": 2})
    assert made.seed == engine.requests[-1]["seed"] is not None
    assert engine.handle.generate(PROMPT, {"max_tokens": 2}, seed=7).seed == 7
    for wrong in ({"seed": 3}, {"n": 2}, {"prompt_embeds": "x"}):
        with pytest.raises(InputError, match="one completion"):
            engine.handle.generate(PROMPT, wrong)


def test_an_engine_that_does_not_tell_has_versions_at_the_start_and_the_end(
    engine: Generating,
) -> None:
    engine.tells = False
    assert engine.handle.generate(PROMPT, GREEDY).weights == (Weights(0, root(0), 0),)
    engine.moves = {2: 4}
    made = engine.handle.generate(PROMPT, GREEDY)
    assert made.weights == (Weights(0, root(0), 0), Weights(4, root(4), None))
    assert "which tokens" in engine.handle.replay(made).reason


def test_weights_that_nobody_has_synced_are_no_version(engine: Generating) -> None:
    engine.live = 8  # by another handle
    with pytest.raises(EngineError, match="tag '8', no known version of 'policy'"):
        engine.handle.generate(PROMPT, GREEDY)


def test_a_replay_goes_to_each_version_and_compares_every_bit(engine: Generating) -> None:
    sampled = engine.handle.generate(PROMPT, {"max_tokens": 4})
    engine.moves = {2: 4}
    moved = engine.handle.generate(PROMPT, GREEDY)
    for made in (sampled, moved):  # 4 is live: the first is an older one
        found = engine.handle.replay(made)
        assert (found.same, found.token_ids) == (True, made.token_ids)
        assert found.logprobs == made.logprobs
    other = replace(moved, logprobs=(*moved.logprobs[:3], -2.0))
    found = engine.handle.replay(other)
    assert (found.same, found.differing) == (False, (3,))
    engine.off = 1e-9
    assert engine.handle.replay(sampled).differing == (0, 1, 2, 3)
    with pytest.raises(StateMismatch, match="the root"):
        engine.handle.replay(replace(moved, weights=(Weights(0, root(9)),)))


def test_what_cannot_be_generated_again_is_said(engine: Generating) -> None:
    made = engine.handle.generate(PROMPT, {"max_tokens": 4})
    moved = replace(made, weights=(made.weights[0], Weights(1, root(1), 2)))
    penalized = replace(moved, sampling={**GREEDY, "presence_penalty": 1.0})
    reasons = {
        "has no prompt": replace(made, prompt_token_ids=None),
        "without a seed": replace(made, seed=None),
        "stream 'other'": replace(made, stream="other"),
        "random numbers": moved,
        "presence_penalty": penalized,
        "'prompt'": replace(made, sampling={**GREEDY, "prompt": [[666]]}),
        "several completions": replace(made, sampling={**GREEDY, "n": 2}),
        "'model'": replace(made, sampling={**GREEDY, "model": "another"}),
        "'truncate_prompt_tokens'": replace(made, sampling={"truncate_prompt_tokens": 1}),
    }
    for reason, rollout in reasons.items():
        found = engine.handle.replay(rollout)
        assert not found.same
        assert reason in found.reason


def test_what_is_no_record_is_refused_with_its_line(engine: Generating, tmp_path: Path) -> None:
    file, made = tmp_path / "r.jsonl", engine.handle.generate(PROMPT, GREEDY)
    facts = json.loads(made.to_json())
    wrong = [
        {"rollout": 2},
        {"more": 1},
        {"token_ids": [1.5]},
        {"token_ids": None},
        {"logprobs": []},
        {"weights": []},
        {"weights": [{"version": 0, "root": root(0), "start": 1}]},
        {"prompt_token_ids": [1]},
        {"seed": "7"},
    ]
    for change in wrong:
        with pytest.raises(InputError, match="no rollout"):
            Rollout.from_json(json.dumps(facts | change))
    file.write_text(f"{made.to_json()}\n\nx\n")
    with pytest.raises(InputError, match=r"line 3 of .*no rollout"):
        list(Rollout.read(file))
    file.write_text(f"{made.to_json()}\n{made.to_json()[:50]}")
    assert list(Rollout.read(file)) == [made], "a writer was killed"
    with pytest.raises(InputError, match="as JSON"):
        replace(made, metadata={"a": float("nan")}).to_json()
    with pytest.raises(InputError, match="cannot read"):
        list(Rollout.read(tmp_path))
