"""Another model of the class that an engine runs, made and loaded by vLLM's own code, and a pass through either."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import base_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from ..engines.functional import Fresh

_TOKENS = 16


def fresh(live: nn.Module, config: VllmConfig, device: torch.device) -> Fresh:
    """How to make and run a second model for ``config``, which knows nothing of the modules of the ``live`` one."""
    apart = copy.copy(config)
    apart.compilation_config = copy.copy(config.compilation_config)
    model_config = config.model_config

    def make(tensors: Iterator[tuple[str, torch.Tensor]]) -> nn.Module:
        apart.compilation_config.static_forward_context = {}
        apart.compilation_config.static_all_moe_layers = []
        with set_default_torch_dtype(model_config.dtype), device:
            model: Any = base_loader.initialize_model(vllm_config=apart, model_config=model_config)
            with set_current_vllm_config(apart):
                model.load_weights(tensors)
                base_loader.process_weights_after_loading(model, model_config, device)
        made: nn.Module = model.eval()
        return made

    def run(model: Any) -> torch.Tensor | None:
        used = config if model is live else apart
        positions = torch.arange(_TOKENS, device=device)
        if model_config.uses_mrope:
            positions = positions.expand(3, _TOKENS)
        tokens = torch.arange(_TOKENS, device=device)
        with set_forward_context(None, used, num_tokens=_TOKENS, skip_compiled=True):
            hidden: Any = model(input_ids=tokens, positions=positions, intermediate_tensors=None, inputs_embeds=None)
            noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
            logits: torch.Tensor | None = model.compute_logits(noise)
        return logits

    return Fresh(make, run)
