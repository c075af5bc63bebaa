"""The policy: a small Qwen2, how it samples, and the optimizer that keeps its FP32 master weights.

The model itself holds BF16 weights on both sides: what the trainer computes gradients with, what it
publishes and what the workers sample from are the same bits.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch.func import functional_call
from torch.nn import Parameter

from . import task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_model(seed: int) -> PreTrainedModel:
    """A Qwen2 of 1.6 million random BF16 weights with tied embeddings.

    The initial weights are wider than Qwen2's 0.02, as a hidden size of 256 asks for (1 /
    sqrt(256)); it makes the warm-up several times shorter.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM  # takes seconds

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=task.VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=32,
        initializer_range=0.06,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


# Without instructions for it, BF16 arithmetic takes a CPU ten times as long as FP32.
#: What the model computes in. The weights are the same BF16 values in either case.
ARITHMETIC = torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32


def forward(model: PreTrainedModel, weights: dict[str, torch.Tensor], **inputs: Any) -> Any:
    """The model's output with ``weights`` (see `for_arithmetic`) in place of its own."""
    return functional_call(model, weights, kwargs=inputs)


def for_arithmetic(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's weights rounded to BF16, in ``ARITHMETIC``; gradients flow back to the model's
    own."""
    return {
        name: weight.to(torch.bfloat16).to(ARITHMETIC) for name, weight in model.named_parameters()
    }


def log_probabilities(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token given those before it.

    ``tokens`` int64 [sequences, length] -> float32 [sequences, length - 1].
    """
    output = forward(model, for_arithmetic(model), input_ids=tokens[:, :-1], use_cache=False)
    log_probs: torch.Tensor = output.logits.float().log_softmax(-1)
    return log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


@torch.inference_mode()
def sample(
    model: PreTrainedModel, prompts: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one answer per prompt at temperature 1.

    ``prompts`` int64 [sequences, PROMPT_TOKENS] -> answers int64 [sequences, ANSWER_TOKENS], filled
    with ``task.PAD`` behind the full stop, and their log-probabilities float32 of the same shape.
    """
    weights = for_arithmetic(model)
    answers, log_probs = [], []
    stopped = torch.zeros(len(prompts), dtype=torch.bool)
    tokens, cache = prompts, None
    for _ in range(task.ANSWER_TOKENS):
        output = forward(model, weights, input_ids=tokens, past_key_values=cache, use_cache=True)
        log_p = output.logits[:, -1].float().log_softmax(-1)
        tokens, cache = (
            torch.multinomial(log_p.exp(), 1, generator=generator),
            output.past_key_values,
        )
        log_probs.append(log_p.gather(-1, tokens).squeeze(-1))
        answers.append(tokens.squeeze(-1).masked_fill(stopped, task.PAD))
        stopped = stopped | (answers[-1] == task.STOP)
    return torch.stack(answers, dim=1), torch.stack(log_probs, dim=1)


class MasterWeights:
    """AdamW on FP32 masters of a BF16 model.

    ``step`` takes the BF16 gradients, updates the masters and casts them back into the model. The
    cast is where most of an update disappears: it is smaller than half a rounding step of the
    weight it belongs to.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._weights = list(model.parameters())
        self._masters = [Parameter(weight.detach().float()) for weight in self._weights]
        self.forget_moments()

    def forget_moments(self) -> None:
        self._optimizer = torch.optim.AdamW(
            self._masters, betas=(0.9, 0.999), weight_decay=0.0, fused=True
        )

    def step(self, lr: float, max_norm: float = 1.0) -> float:
        """One update; returns the gradient's norm before clipping."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, max_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._cast()
        return float(norm)

    @property
    def masters(self) -> list[torch.Tensor]:
        """FP32, in the order of the model's parameters."""
        return [master.detach() for master in self._masters]

    def state(self) -> dict[str, Any]:
        return {"masters": self.masters, "optimizer": self._optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"], strict=True):
                master.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self._cast()

    @torch.no_grad()
    def _cast(self) -> None:
        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.copy_(master)


def seeded(*key: object) -> tuple[random.Random, torch.Generator]:
    """Sources of randomness that depend on ``key`` alone.

    Keyed by the seed, the role and the step, they need no place in a checkpoint and resume by
    themselves.
    """
    rng = random.Random("/".join(map(str, key)))
    return rng, torch.Generator().manual_seed(rng.getrandbits(63))
