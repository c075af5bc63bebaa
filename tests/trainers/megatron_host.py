"""Megatron-Core and Megatron-Bridge on a host without CUDA: stand-ins for what they import or ask
of a device alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.models.gpt.gpt_model  # noqa: F401 - before the stand-in: it looks for Transformer Engine
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.overrides import TorchFunctionMode

from tests.support.stub_packages import install


class OnHost(TorchFunctionMode):
    """Within it a tensor that is to be on a CUDA device is in host memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = self.host(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *map(self.host, args[1:]))
        return func(*args, **kwargs)

    def host(self, value: Any) -> Any:
        index = isinstance(value, int) and not isinstance(value, bool)
        named = isinstance(value, str | torch.device) and str(value).startswith("cuda")
        return torch.device("cpu") if index or named else value


def scattered(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """gloo sends memory as it lies, and the bridge gives it columns of a matrix."""

    def run(output: torch.Tensor, parts: list[torch.Tensor] | None = None, **others: Any) -> Any:
        return scatter(output, parts and [part.contiguous() for part in parts], **others)

    return run


CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()  # of dropout, which is off
install("transformer_engine")  # which Megatron-Bridge imports for its adapters
torch.cuda.current_device = lambda: 0  # type: ignore[method-assign]
torch.cuda.set_device = lambda device: None  # type: ignore[method-assign]
torch.cuda.synchronize = lambda device=None: None  # type: ignore[method-assign]
torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = MagicMock
torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment,misc]
dist.scatter = scattered(dist.scatter)
