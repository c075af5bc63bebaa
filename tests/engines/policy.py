"""A small Qwen2 that a test changes by steps large enough to tell, and publishes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import pulse_rl
from pulse_rl.frameworks.transformers import checkpoint_weights
from tests.trainers.support import tiny

PROMPT = list(range(10, 58))
#: The sizes of models of which every layer can be quantized.
SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


class Policy:
    """``folder``/model is the checkpoint of version 0, ``store`` holds the stream "policy"."""

    def __init__(self, folder: Path, *, tied: bool = True, seed: int = 0) -> None:
        sizes = {"vocab_size": 501, "hidden_size": 128, "intermediate_size": 256}  # 501 is padded
        others = {"max_position_embeddings": 256, "initializer_range": 0.06}
        self.model = tiny(torch.bfloat16, seed, tie_word_embeddings=tied, **sizes, **others)
        self.folder = folder
        self.checkpoint = self.save("model")
        self.store = str(folder / "store")
        self.publisher = pulse_rl.Publisher(self.store, stream="policy", threads=1)
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.version = self.publisher.publish(
            self.model.state_dict(), files=self.checkpoint
        ).version

    def save(self, name: str) -> str:
        """Writes the model and a tokenizer of one word a token as a checkpoint, and returns its
        path."""
        self.model.save_pretrained(self.folder / name)
        words = WordLevel(
            {f"t{token}": token for token in range(self.model.config.vocab_size)}, unk_token="t0"
        )
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(
            self.folder / name
        )
        return str(self.folder / name)

    def step(self, density: float = 0.05) -> int:
        """Draws ``density`` of each tensor anew, publishes, and returns the version."""
        redraw(self.model, density, self.generator)
        self.version = self.publisher.publish(self.model.state_dict()).version
        return self.version

    @torch.no_grad()
    def log_probabilities_of_all(self) -> torch.Tensor:
        """Of every token after each of PROMPT, as Hugging Face computes them in FP32: float32
        [len(PROMPT), vocabulary]."""
        logits = self.model.float()(torch.tensor([PROMPT])).logits[0]
        self.model.to(torch.bfloat16)
        return logits.log_softmax(-1)

    def log_probabilities(self) -> torch.Tensor:
        """Of PROMPT: float32 [len(PROMPT) - 1]."""
        tokens = torch.tensor(PROMPT)[1:, None]
        return self.log_probabilities_of_all()[:-1].gather(-1, tokens)[:, 0]


@torch.no_grad()
def redraw(model: torch.nn.Module, density: float, generator: torch.Generator) -> None:
    """Draws ``density`` of each weight of a model anew."""
    for weight in model.parameters():
        chosen = torch.rand(weight.shape, generator=generator) < density
        drawn = torch.randn(weight.shape, generator=generator) * 0.06
        weight.copy_(torch.where(chosen, drawn.to(weight.dtype), weight))


class Followed:
    """A model that is trained in ten steps, small ones and large ones, and published quantized;
    ``saved`` writes the newest version as a checkpoint."""

    def __init__(self, trained: torch.nn.Module, folder: Path, quantize: object) -> None:
        self._trained, self._folder, self._quantize = trained, folder, quantize
        self.store = str(folder / "store")
        self._publisher = pulse_rl.Publisher(self.store, stream="policy", threads=1)

    def publish(self, **given: object) -> int:
        weights = dict(checkpoint_weights(self._trained))
        return self._publisher.publish(weights, quantize=self._quantize, **given).version

    def saved(self, name: str) -> Path:
        with pulse_rl.Subscriber(self.store, stream="policy") as subscriber:
            subscriber.sync()
            subscriber.save(self._folder / name)
        return self._folder / name

    def ten_versions(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(1)
        for number in range(10):
            redraw(self._trained, 0.3 if number % 4 == 3 else 0.01, generator)
            yield self.publish()
