"""The entry point in ``sglang.srt.plugins``, the custom weight loader, and what runs in SGLang's
workers, one for each model that follows a stream.

A custom weight loader cannot answer: SGLang ignores what it returns, and ends when it raises. The
checks of weights can be asked for while the server generates, by any text, and answer with a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...errors import EngineError, InputError, PulseError, UnsupportedTensor
from ..derived_params import PostLoadLayers
from ..node import Node
from ..post_load import (
    HOOK,
    Before,
    Group,
    ProcessedLayer,
    group_of,
    module_names,
    remember,
    tensor_names,
    with_method,
)
from ..session import Session, VerifiedMap, local_checkpoint
from ..transport import WEIGHTS, InitInfo, Status
from ..worker import Worker, described
from . import ACTION, LOADER

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader"
_DERIVED = ("w_kc", "w_vc")
_PARTS = frozenset({WEIGHTS, "kv_cache", "cuda_graph"})
_before: WeakKeyDictionary[torch.nn.Module, dict[int, Before]] = WeakKeyDictionary()
_models: WeakKeyDictionary[torch.nn.Module, _Followed] = WeakKeyDictionary()


def register() -> None:
    """Called by SGLang once in each of its processes, before its hooks are applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooked = {
        _MANAGER: (check_weights, release_memory_occupation, resume_memory_occupation),
        _UPDATER: (
            begin_weight_update,
            update_weights_from_tensor,
            load_weights_from_distributed,
            end_weight_update,
        ),
        _LOADER: (postprocess_weights,),
    }
    for owner, hooks in hooked.items():
        for hook in hooks:  # each has the name of the method that it surrounds
            HookRegistry.register(f"{owner}.{hook.__name__}", hook, HookType.AROUND)


def postprocess_weights(
    original: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Notes the state of the modules before their weights are processed for the first time."""
    if model not in _before:
        subjects = [subject for group in _groups(model) for subject in group.subjects]
        _before[model] = remember(subjects, tensor_names(model))
    return original(model, *args, **kwargs)


def begin_weight_update(original: Callable[[Any], None], updater: Any) -> None:
    """SGLang undoes here what it made of the weights, and makes it again at the end. What follows a
    stream is written as it is computed with: for it, that waits until somebody else loads
    something."""
    followed = _models.get(updater.get_model())
    if followed is None:
        original(updater)
    else:
        followed.undo = lambda: original(updater)


def end_weight_update(original: Callable[..., None], updater: Any, **kwargs: Any) -> None:
    followed = _models.get(updater.get_model())
    if followed is None or followed.undo is None:
        original(updater, **kwargs)
    else:
        followed.undo = None


def load_weights_from_distributed(
    original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any
) -> Any:
    """Somebody else's update."""
    followed = _models.get(updater.get_model())
    if followed is not None and followed.undo is not None:
        followed.undo()
        followed.undo = None
    return original(updater, *args, **kwargs)


def check_weights(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Answers the requests of a handle, with all workers' statuses as JSON; leaves other checks to
    SGLang."""
    if request.action != ACTION:
        return original(manager, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    try:
        asked = json.loads(request.skip_tensor_list[0])
        statuses = answer(manager.tp_worker.model_runner, asked)
        return CheckWeightsReqOutput(success=True, message=json.dumps(statuses))
    except Exception as error:  # whatever is raised here ends the server
        message = f"pulse: {type(error).__name__}: {error}"
        return CheckWeightsReqOutput(success=False, message=message)


def release_memory_occupation(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Notes what is taken away: weights come back with what they had only under some of SGLang's
    options."""
    parts = request.tags or _PARTS
    _followed(manager.tp_worker.model_runner).worker.sleep(parts, lost=WEIGHTS in parts)
    return original(manager, request)


def resume_memory_occupation(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    result = original(manager, request)
    _followed(manager.tp_worker.model_runner).worker.wake_up(request.tags or None)
    return result


def update_weights_from_tensor(
    original: Callable[..., tuple[bool, str]], updater: Any, *args: Any, **kwargs: Any
) -> tuple[bool, str]:
    """(whether the weights were updated, a message): with what `load` made of it. Leaves other
    updates to SGLang."""
    if LOADER not in (kwargs.get("load_format"), *args[1:]):
        answer: tuple[bool, str] = load_weights_from_distributed(original, updater, *args, **kwargs)
        return answer
    if LOADER not in updater.custom_weight_loaders:  # SGLang would end
        return False, f"start the server with --custom-weight-loader {LOADER}"

    success, message = original(updater, *args, **kwargs)
    failure = outcome(updater.get_model())
    return (success, message) if failure is None else (False, f"{failure} ({failure.hint})")


@dataclass(slots=True)
class _Followed:
    """``wanted``: the version that was asked for last; ``failure``: of the last update; ``undo``:
    what SGLang does at the beginning of an update, while that waits."""

    worker: Worker
    wanted: int | None = None
    failure: PulseError | None = None
    undo: Callable[[], None] | None = None


def _followed(runner: Any) -> _Followed:
    followed = _models.get(runner.model)
    if followed is None:
        import sglang

        open_session = partial(_open_session, runner)
        worker = Worker(open_session, _workers, ("sglang", sglang.__version__))
        followed = _models[runner.model] = _Followed(worker)
    return followed


def answer(runner: Any, asked: dict[str, Any]) -> list[Status]:
    """What all workers say to a request of a handle: ``action``, ``owner``, and ``version`` as of
    `Worker.answer`, or the action "open" with an ``init_info``. ``runner``: SGLang's runner of the
    target model. Collective."""
    followed = _followed(runner)
    worker, action = followed.worker, asked["action"]
    if action == "open":
        failure = worker.open(InitInfo(**asked["init_info"]))
        status = worker.status() | ({"failure": described(failure)} if failure is not None else {})
    else:
        status = worker.answer(action, asked["owner"], asked.get("version"))
        if action == "stage" and "failure" not in status:
            followed.wanted = asked.get("version")
    return worker.node.gathered(status)


def update(model: torch.nn.Module, named_tensors: list[tuple[str, Any]]) -> None:
    """What `load` does; `outcome` says what became of it. Collective."""
    followed = _models.get(model)
    if followed is None:
        return
    if named_tensors:
        followed.failure = InputError(
            "the loader of pulse takes no tensors: it reads a stream",
            hint="Send an empty list of named tensors.",
        )
        return
    followed.worker.begin_update()
    followed.failure = followed.worker.update(followed.wanted)


def outcome(model: torch.nn.Module) -> PulseError | None:
    """Why the last update of ``model`` failed."""
    followed = _models.get(model)
    if followed is None:
        return InputError(
            "this model follows no stream",
            hint="Call connect(), and update with the selector 'target'.",
        )
    return followed.failure


def _open_session(runner: Any, info: InitInfo, node: Node, known: VerifiedMap) -> Session:
    config, model = runner.model_config, runner.model
    _require_one_group()
    _require_own_weights(model)
    base = info.base or local_checkpoint(config.model_path, config.revision)
    loaded = runner.server_args.load_format != "dummy"
    forms = PostLoadLayers(node.together(lambda: _processed_layers(model, config.dtype)))
    return Session(model, info, node, known, base, nullcontext, forms, loaded=loaded)


def _processed_layers(model: torch.nn.Module, dtype: torch.dtype) -> list[ProcessedLayer]:
    @contextmanager
    def as_at_load() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    known = _before.get(model, {})
    return [ProcessedLayer(model, group, known, as_at_load) for group in _groups(model)]


def _groups(model: torch.nn.Module) -> Iterator[Group]:
    """The modules whose method processes their weights."""
    names = module_names(model)
    for module in model.modules():
        if _processes(getattr(module, "quant_method", None)):
            yield group_of(names, with_method(module), [module])


def _processes(method: object) -> bool:
    kinds = type(method).__mro__
    own = next((kind for kind in kinds if HOOK in vars(kind)), None)
    # Scales of caches become numbers: a session refuses streams that have some.
    cache = any(kind.__name__ == "BaseKVCacheMethod" for kind in kinds)
    return own is not None and own.__name__ != "QuantizeMethodBase" and not cache


def _require_one_group() -> None:
    """Raises EngineError unless all workers are one tensor-parallel group that owns its weights."""
    from sglang.srt.runtime_context import get_model, get_parallel

    parallel = get_parallel()
    if parallel.pp_size > 1 or parallel.dp_size > 1:
        raise EngineError(
            f"the server has {parallel.dp_size} data-parallel replicas and {parallel.pp_size} "
            "pipeline stages",
            hint="Start one server for each replica, without pipeline stages, and follow with "
            "each.",
        )
    if get_model().weight_cache_mode != "off":
        raise EngineError(
            "the server shares its weights with other servers",
            hint="Start it with --weight-cache-mode off.",
        )


def _require_own_weights(model: torch.nn.Module) -> None:
    """Raises UnsupportedTensor where a layer computes with something else than the parameters that
    were loaded."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import (
        _unsupported_derived_weight_cache_error as derived,
    )

    reason = derived(model)
    if reason is not None:
        raise UnsupportedTensor(f"SGLang refuses updates of this model: {reason}")
    for name, layer in model.named_modules():
        if any(isinstance(getattr(layer, attribute, None), torch.Tensor) for attribute in _DERIVED):
            raise UnsupportedTensor(
                f"the engine computes {name!r} with matrices that it derived from its weights",
                hint="Multi-head latent attention cannot follow a stream yet.",
            )
        packed = getattr(layer, "use_intel_amx_backend", False)
        if packed and not _processes(getattr(layer, "quant_method", None)):
            raise UnsupportedTensor(
                f"the engine computes {name!r} with a packed copy of its weight",
                hint="SGLang packs weights for AMX on CPUs; such a server cannot follow a stream.",
            )


def _workers() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group if torch.distributed.is_initialized() else None
