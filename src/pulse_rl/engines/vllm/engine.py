"""The weight-transfer engine ``pulse``, as vLLM's workers know it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import vllm
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import base_loader
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.worker_base import WorkerBase

from ...errors import EngineError, PulseError
from ..derived_params import PostLoadLayers
from ..node import Node
from ..post_load import as_meta
from ..self_check import Fresh
from ..session import Session, VerifiedMap, local_checkpoint
from ..transport import WEIGHTS, InitInfo
from ..worker import Worker
from .plugin import (
    processed_layers,
    quantized_layers,
    require_caches_that_empty,
    require_fixed_places,
    require_known,
    require_plain_weights,
)

require_known(WeightTransferEngine, vllm.__version__)
_TOKENS = 16


@dataclass
class PulseInitInfo(InitInfo, WeightTransferInitInfo):
    """`InitInfo`, as vLLM parses it."""


@dataclass
class PulseUpdateInfo(WeightTransferUpdateInfo):
    """``version``: which to go to; None: the newest that is staged. ``owner``: of the handle that
    asks, if one does. ``wait_seconds``: how long to wait for a ``version`` that is not staged yet;
    an engine generates nothing meanwhile."""

    version: int | None = None
    owner: str = ""
    wait_seconds: float = 0.0


class PulseWeightTransferEngine(WeightTransferEngine[PulseInitInfo, PulseUpdateInfo]):
    """Follows a stream in the background; between start and finish it scatters the staged
    update."""

    init_info_cls = PulseInitInfo
    update_info_cls = PulseUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.worker = Worker(self._open_session, _workers, ("vllm", vllm.__version__))
        self.left_open = False
        watch_workers(WorkerBase)

    # -- vLLM's contract

    def init_transfer_engine(self, init_info: PulseInitInfo) -> None:
        self._raise_on_the_last(self.worker.open(init_info))

    def start_weight_update(self) -> None:
        self.worker.begin_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PulseUpdateInfo) -> None:
        asked = (update_info.version, update_info.owner, update_info.wait_seconds)
        self._raise_on_the_last(self.worker.update(*asked))

    def finish_weight_update(self) -> None:
        """Nothing is left to do: `update_weights` returns when the device has the bits."""

    def shutdown(self) -> None:
        self.worker.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.26 and 0.27 ask for it, and never call it."""
        raise EngineError(
            "the backend pulse sends no weights from here", hint="Use the trainer's engine."
        )

    # -- the parts

    def _open_session(self, info: InitInfo, node: Node, known: VerifiedMap) -> Session:
        require_plain_weights(self.model)
        require_fixed_places(self.vllm_config)
        require_caches_that_empty(self.vllm_config)
        base = info.base or local_checkpoint(self.model_config.model, self.model_config.revision)
        around = partial(reloading, self.model, self.model_config)
        forms = node.together(self._post_load_layers)
        staged = self.vllm_config.parallel_config.pipeline_parallel_size > 1
        alone = staged or self.model_config.quantization
        another = None if alone else fresh(self.model, self.vllm_config, self.device)
        loaded = self.vllm_config.load_config.load_format != "dummy"
        return Session(
            self.model,
            info,
            node,
            known,
            base,
            around,
            forms,
            loaded=loaded,
            fresh=another,
            initial_buffers=partial(initial_buffers, self.vllm_config, self.device),
        )

    def _post_load_layers(self) -> PostLoadLayers:
        quantized = quantized_layers(self.model, self.model_config.quantization, self._as_at_load)
        known = [layer.module for layer in quantized]
        processed = processed_layers(self.model, self.model_config.dtype, self._as_at_load, known)
        return PostLoadLayers([*quantized, *processed])

    @contextmanager
    def _as_at_load(self) -> Iterator[None]:
        """The surroundings in which vLLM processes weights after loading."""
        with (
            set_current_vllm_config(self.vllm_config),
            set_default_torch_dtype(self.model_config.dtype),
            self.device,
        ):
            yield

    def _raise_on_the_last(self, failure: PulseError | None) -> None:
        """Raises ``failure``, which all workers have noted, on the last one.

        vLLM's executor reads the workers' replies in order up to the first failure, and takes what
        it left for the replies to the next call. The workers that do not raise keep the session of
        vLLM open; see `_pulse`.
        """
        if failure is None:
            return
        last = self.worker.node.last
        self.left_open = not last
        if last:
            raise failure


def _workers() -> Any:
    return parallel_state.get_world_group() if torch.distributed.is_initialized() else None


def _pulse(self: Any, action: str, owner: str = "", version: int | None = None) -> dict[str, Any]:
    engine: PulseWeightTransferEngine = self.weight_transfer_engine
    if engine.left_open:
        engine.left_open = self._weight_update_active = False
    status = engine.worker.answer(action, owner, version)
    if action == "hello" and "failure" not in status:
        self._weight_update_active = False  # left open by a handle that died
    return status


WorkerBase.pulse = _pulse  # how `collective_rpc` reaches the engine, over HTTP as well


_SLEEPS = frozenset({WEIGHTS, "kv_cache"})
_WRITES = ("reload_weights", "reset_weights")


def watch_workers(kind: type) -> None:
    """Lets the workers of all classes under ``kind`` tell our engine of what else they do to the
    weights: sleep, which takes the memory away, and at level 2 what is in it; and loading. May be
    called again."""
    for name in ("sleep", "wake_up", "discard", *_WRITES):
        call = vars(kind).get(name)
        if call is not None and not hasattr(call, "_pulse"):
            setattr(kind, name, _told(name, call))
    below: list[type] = kind.__subclasses__()
    for under in below:
        watch_workers(under)


def _told(name: str, call: Any) -> Any:
    @wraps(call)
    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine = getattr(self, "weight_transfer_engine", None)
        worker = engine.worker if isinstance(engine, PulseWeightTransferEngine) else None
        given = inspect.signature(call).bind(self, *args, **kwargs)
        given.apply_defaults()
        if worker is not None and name == "sleep" and given.arguments["level"]:
            worker.sleep(_SLEEPS, lost=given.arguments["level"] > 1)
        elif worker is not None and name == "discard":
            worker.sleep(given.arguments["tags"], lost=WEIGHTS in given.arguments["tags"])
        elif worker is not None and name in _WRITES:
            worker.forget()
        result = call(self, *args, **kwargs)
        if worker is not None and name == "wake_up":
            worker.wake_up(given.arguments["tags"])
        return result

    telling._pulse = True  # type: ignore[attr-defined]
    return telling


@contextmanager
def reloading(model: torch.nn.Module, model_config: Any) -> Iterator[None]:
    """Weights loaded within are processed layer by layer, as after the first load."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(model)
    try:
        yield
    finally:
        finalize_layerwise_reload(model, model_config)


def set_apart(config: VllmConfig) -> VllmConfig:
    """A copy for another model, which registers its layers there."""
    apart = copy.copy(config)
    apart.compilation_config = copy.copy(config.compilation_config)
    apart.compilation_config.static_forward_context = {}
    apart.compilation_config.static_all_moe_layers = []
    return apart


def initial_buffers(config: VllmConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """The buffers of a model that loads nothing. Its parameters take no memory."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = as_meta(parameter)  # type: ignore[assignment]

    model_config = config.model_config
    nn.Module.register_parameter = without_memory  # type: ignore[method-assign,assignment]
    try:
        with set_default_torch_dtype(model_config.dtype), device:
            model: nn.Module = base_loader.initialize_model(
                vllm_config=set_apart(config), model_config=model_config
            )
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    return dict(model.named_buffers())


def tie_as(model: nn.Module, live: nn.Module) -> None:
    """Ties the parameters of ``model`` that share memory in ``live``: vLLM ties a head again after
    loading if it equals the embedding, whatever the config says."""
    first: dict[int, str] = {}
    for name, parameter in live.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, model.get_parameter(known))


def fresh(live: nn.Module, config: VllmConfig, device: torch.device) -> Fresh:
    """How to make and run a second model for ``config``, which knows nothing of the modules of the
    ``live`` one."""
    apart, model_config = set_apart(config), config.model_config

    def make(tensors: Iterator[tuple[str, torch.Tensor]]) -> nn.Module:
        apart.compilation_config.static_forward_context = {}
        apart.compilation_config.static_all_moe_layers = []
        with set_default_torch_dtype(model_config.dtype), device:
            model: Any = base_loader.initialize_model(vllm_config=apart, model_config=model_config)
            tie_as(model, live)
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
            hidden: Any = model(
                input_ids=tokens, positions=positions, intermediate_tensors=None, inputs_embeds=None
            )
            if getattr(model, "is_pooling_model", False):
                pooled: torch.Tensor = hidden
                return pooled
            noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
            logits: torch.Tensor | None = model.compute_logits(noise)
        return logits

    return Fresh(make, run)
