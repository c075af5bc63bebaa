"""The entry point in ``sglang.srt.plugins``: how a worker hears of a handle, and answers.

A custom weight loader cannot answer: SGLang ignores what it returns, and ends when it raises. The checks of weights can
be asked for while the server generates, by any text, and answer with a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .loader import LOADER

ACTION = "pulse"
"""The action of ``/weights_checker`` whose answer is this module's."""

_CHECKS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights"
_UPDATES = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor"


def register() -> None:
    """Called by SGLang once in each of its processes, before its hooks are applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_CHECKS, check_weights, HookType.AROUND)
    HookRegistry.register(_UPDATES, update_weights_from_tensor, HookType.AROUND)


def check_weights(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Answers the requests of a handle, with all workers' statuses as JSON; leaves other checks to SGLang."""
    if request.action != ACTION:
        return original(manager, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    from .worker import answer

    try:
        asked = json.loads(request.skip_tensor_list[0])
        statuses = answer(manager.tp_worker.model_runner, asked)
        return CheckWeightsReqOutput(success=True, message=json.dumps(statuses))
    except Exception as error:  # whatever is raised here ends the server
        return CheckWeightsReqOutput(success=False, message=f"pulse: {type(error).__name__}: {error}")


def update_weights_from_tensor(
    original: Callable[..., tuple[bool, str]], updater: Any, *args: Any, **kwargs: Any
) -> tuple[bool, str]:
    """(whether the weights were updated, a message): with what `load` made of it. Leaves other updates to SGLang."""
    if LOADER not in (kwargs.get("load_format"), *args[1:]):
        return original(updater, *args, **kwargs)
    if LOADER not in updater.custom_weight_loaders:  # SGLang would end
        return False, f"start the server with --custom-weight-loader {LOADER}"
    from .worker import outcome

    success, message = original(updater, *args, **kwargs)
    failure = outcome(updater.get_model())
    return (success, message) if failure is None else (False, f"{failure} ({failure.hint})")
