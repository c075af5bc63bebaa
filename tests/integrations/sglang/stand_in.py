"""A stand-in for an SGLang server: its routes and rules for weights as SGLang 0.5.23 has them, with
pulse's plugin and loader applied, on a small model. What the real package does with the same calls,
tests/engines_sglang shows.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pulse_rl.engines.sglang import LOADER, load, plugin
from tests.support.http import serving_json

_RUNTIME = "sglang.srt.runtime_context"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_STRUCTS = "sglang.srt.managers.io_struct"


@dataclass
class CheckWeightsReqOutput:
    success: bool
    message: str


def install(patch: pytest.MonkeyPatch, **parallel: int) -> None:
    """Puts what the plugin imports of SGLang where it finds it."""
    runtime = ModuleType(_RUNTIME)
    facts = {"pp_size": 1, "dp_size": 1} | parallel
    runtime.get_parallel = lambda: SimpleNamespace(**facts)  # type: ignore[attr-defined]
    runtime.get_model = lambda: SimpleNamespace(weight_cache_mode="off")  # type: ignore[attr-defined]
    updater = ModuleType(_UPDATER)
    updater._unsupported_derived_weight_cache_error = lambda model: None  # type: ignore[attr-defined]
    structs = ModuleType(_STRUCTS)
    structs.CheckWeightsReqOutput = CheckWeightsReqOutput  # type: ignore[attr-defined]
    package = ModuleType("sglang")
    package.__version__ = "0.5.23"  # type: ignore[attr-defined]
    for module in (package, runtime, updater, structs):
        patch.setitem(sys.modules, module.__name__, module)


class StandIn:
    """A server whose one worker holds ``model``, loaded from the checkpoint ``base``.

    ``plugged``: whether the plugin is loaded; ``custom_weight_loaders``: the server's option of
    that name; ``running``: requests in flight; ``stubborn``: how often the cache is not flushed
    whatever happens; ``calls``: what was asked, without the looks at the status.
    """

    def __init__(self, model: torch.nn.Module, base: str) -> None:
        config = SimpleNamespace(dtype=torch.bfloat16, model_path=base, revision=None)
        args = SimpleNamespace(load_format="auto")
        self.runner = SimpleNamespace(model=model, model_config=config, server_args=args)
        self.custom_weight_loaders = [LOADER]
        self.plugged = True
        self.running = 0
        self.stubborn = 0
        self.session: str | None = None
        self.paused = ""
        self.weight_version = "default"
        self.calls: list[str] = []

    # -- as the plugin sees SGLang's objects

    @property
    def tp_worker(self) -> SimpleNamespace:
        return SimpleNamespace(model_runner=self.runner)

    def get_model(self) -> torch.nn.Module:
        return self.runner.model

    # -- the routes

    def weights_checker(self, body: dict[str, Any]) -> tuple[int, Any]:
        def original(manager: StandIn, request: Any) -> CheckWeightsReqOutput:
            return CheckWeightsReqOutput(False, f"Unsupported action={request.action!r}")

        request = SimpleNamespace(**({"skip_tensor_list": None} | body))
        check = plugin.check_weights if self.plugged else lambda original, *rest: original(*rest)
        done = check(original, self, request)
        return 200 if done.success else 400, {"success": done.success, "message": done.message}

    def pause_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert body["mode"] in ("abort", "retract", "in_place")
        self.calls.append(f"pause {body['mode']}")
        self.paused = body["mode"]
        self.running = 0 if self.paused == "abort" else self.running
        return 200, {"status": "ok"}

    def continue_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert body == {"torch_empty_cache": False}
        self.calls.append("continue")
        self.paused = ""
        return 200, {"status": "ok"}

    def begin_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.session is not None:
            return told(
                False, "a weight-update session is already open; call end_weight_update() first"
            )
        self.calls.append("begin")
        plugin.begin_weight_update(lambda updater: None, self)
        self.session = body["selector"]
        return told(True, "Success")

    def update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.session is None:
            return told(
                False, "update_weights_from_tensor must run between begin_weight_update() and ..."
            )
        assert body["selector"] == "target"
        assert len(body["serialized_named_tensors"]) == 1
        self.calls.append("update")

        def original(
            updater: StandIn, named_tensors: Any, load_format: str | None
        ) -> tuple[bool, str]:
            with torch.inference_mode():  # as SGLang's event loop
                load(updater.get_model(), named_tensors)
            return True, "Success"

        update = (
            plugin.update_weights_from_tensor
            if self.plugged
            else lambda original, *rest: original(*rest)
        )
        success, message = update(original, self, [], body["load_format"])
        if success and body["flush_cache"] and not self.flush():
            success = False
            message = "Weights were updated, but the cache was not flushed because ..."
        return told(success, message)

    def end_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.session is None:
            return told(False, "no weight-update session is open; call begin_weight_update() first")
        self.calls.append("end")
        plugin.end_weight_update(lambda updater: processed(updater.get_model()), self)
        self.session = None
        return told(True, "Success")

    def update_weight_version(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert body["abort_all_requests"] is False
        self.weight_version = body["new_version"]
        self.calls.append(f"version {self.weight_version}")
        return told(True, "")

    def flush_cache(self, body: None) -> tuple[int, Any]:
        self.calls.append("flush")
        return (200, "Cache flushed.") if self.flush() else (400, "Flush cache failed.")

    def model_info(self, body: None) -> tuple[int, Any]:
        return 200, {"model_path": "m", "weight_version": self.weight_version}

    def flush(self) -> bool:
        self.stubborn -= 1
        return self.stubborn < 0 and (self.running == 0 or self.paused == "retract")


def processed(model: torch.nn.Module) -> None:
    """As at the end of loading."""
    if hasattr(model, "quant_method"):
        model.quant_method.process_weights_after_loading(model)


def told(success: bool, message: str) -> tuple[int, Any]:
    return 200 if success else 400, {"success": success, "message": message}


def serving(engine: StandIn) -> AbstractContextManager[str]:
    """The URL at which ``engine`` answers."""

    def answer(path: str, body: Any) -> tuple[int, Any]:
        route = getattr(engine, path[1:].partition("?")[0], None)
        return route(body) if route else (404, {"detail": "Not Found"})

    return serving_json(answer)
