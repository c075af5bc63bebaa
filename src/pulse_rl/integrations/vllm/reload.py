"""What vLLM does around a model's loader when weights are loaded again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def reloading(model: torch.nn.Module, model_config: Any) -> Iterator[None]:
    """Weights loaded within are processed layer by layer, as after the first load."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    try:
        yield
    finally:
        finalize_layerwise_reload(model, model_config)
