"""The language model of `make demo-llm`: one pass over a prompt for all its answers, and the
additions that it is trained and tested on."""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.llm_grpo.model import log_probabilities, sample
from examples.llm_grpo.task import Additions

pytestmark = pytest.mark.slow  # transformers takes seconds to import


@pytest.fixture(scope="module")
def task() -> Additions:
    alphabet = {one: at for at, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Additions(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_answers_that_share_a_prompt_have_the_log_probabilities_of_whole_texts(
    task: Additions,
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes))
    prompts = task.prompts([(10, 11), (48, 49)])
    answers, sampled = sample(model, prompts, 3, 4, torch.Generator().manual_seed(1))
    computed, entropy = log_probabilities(model, prompts, answers)
    texts = torch.cat([prompts.repeat_interleave(3, dim=0), answers], dim=1)
    whole = model(texts).logits[:, -5:-1].log_softmax(-1)
    expected = whole.gather(-1, answers[..., None]).squeeze(-1)
    torch.testing.assert_close(sampled, expected)
    torch.testing.assert_close(computed, expected)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=whole).entropy())
    gradients = [
        torch.autograd.grad(one.sum(), model.model.layers[0].mlp.up_proj.weight)[0]
        for one in (computed, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_problems_that_are_held_out_are_trained_on_in_no_order(task: Additions) -> None:
    tested = {frozenset(problem) for problem in task.test}
    drawn = task.draw(random.Random(0), 20_000)
    assert len(task.test) == len(tested) == 128
    assert not tested & set(map(frozenset, drawn))
    assert len(set(map(frozenset, drawn))) == 40 * 41 // 2 - 128


@pytest.mark.parametrize(
    ("answer", "reward", "length"),
    [("59.", 1, 3), ("59 ", 1, 3), ("590", 0, 3), ("58.", 0, 3), ("5.9", 0, 2), ("x59", 0, 1)],
)
def test_a_reward_is_for_the_exact_sum(
    task: Additions, answer: str, reward: int, length: int
) -> None:
    tokens = torch.tensor(task.tokenizer([answer]).input_ids)
    assert task.rewards([(12, 47)], tokens).tolist() == [reward]
    assert task.counted(tokens).sum() == length
