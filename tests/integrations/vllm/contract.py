"""vLLM's weight-transfer contract of one version, from what `tools/vllm_contract.py` has unpacked
of its wheel, without vLLM.

The modules ``vllm.distributed.weight_transfer.{base,factory,clients}`` are its own. All others are
stand-ins: its configuration, logger and platform, what it does to layers after loading, and its
worker and server, which are `client_of`.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from json import dumps, loads
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.stub_packages import Finder
from tools.vllm_contract import FOLDER, RUN

TRANSFER = "vllm.distributed.weight_transfer"
OURS = "pulse_rl.engines.vllm"
#: Of the stand-ins, what is more than a name.
GIVEN: dict[str, dict[str, Any]] = {
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.config": {"set_current_vllm_config": nullcontext},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
    "vllm.utils.torch_utils": {"set_default_torch_dtype": nullcontext},
    "vllm.model_executor.layers.attention": {"is_deferred_attention_layer": lambda module: False},
}
Change = Callable[[str, str], str]


class Unpacked(Finder):
    """``change`` makes of a file's name and text the text that is run."""

    def __init__(self, version: str, change: Change) -> None:
        super().__init__("vllm", version)
        self._folder, self._change = FOLDER / version, change

    def exec_module(self, module: ModuleType) -> None:
        place = module.__name__.replace(".", "/")
        for name in {f"{place}.py", f"{place}/__init__.py"} & set(RUN):
            text = self._change(Path(name).stem, (self._folder / name).read_text())
            exec(compile(text, name, "exec"), vars(module))
        vars(module).update(GIVEN.get(module.__name__, {}))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        own = f"{spec.name}.".startswith(f"{TRANSFER}.")
        return ModuleType(spec.name) if own else super().create_module(spec)


@contextmanager
def contract(version: str, change: Change = lambda _, text: text) -> Iterator[SimpleNamespace]:
    """The modules of the contract, and our side of it, imported over them."""
    require_unpacked(version)
    names = {"base": TRANSFER, "factory": TRANSFER, "clients": TRANSFER, "trainer": OURS}
    ours = [f"{OURS}.{name}" for name in ("engine", "plugin", "trainer")]
    before = {n: m for n, m in sys.modules.items() if n in ours or f"{n}.".startswith("vllm.")}
    finder = Unpacked(version, change)

    def forget() -> None:
        for name in [n for n in sys.modules if n in ours or f"{n}.".startswith("vllm.")]:
            del sys.modules[name]

    forget()
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(ours[1]).register()
        yield SimpleNamespace(
            **{name: importlib.import_module(f"{at}.{name}") for name, at in names.items()}
        )
    finally:
        sys.meta_path.remove(finder)
        forget()
        sys.modules |= before


def require_unpacked(version: str) -> None:
    """Skips the test where that was not possible."""
    if not (FOLDER / version).exists():
        pytest.skip(f"vLLM {version}: `make vllm-contract` unpacks it where wheels are to be had")


def engine_of(vllm: SimpleNamespace, model: torch.nn.Module, base: Path) -> Any:
    """The engine of a worker of vLLM, by its factory."""
    named = {"model": str(base), "revision": None, "quantization": None, "dtype": torch.bfloat16}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=2),  # no second model for the proof
        model_config=SimpleNamespace(**named),
        load_config=SimpleNamespace(load_format="auto"),
    )
    factory = vllm.factory.WeightTransferEngineFactory
    transfer = SimpleNamespace(backend="pulse")
    return factory.create_engine(transfer, config, torch.device("cpu"), model)


def client_of(vllm: SimpleNamespace, engine: Any, calls: list[tuple[str, Any]]) -> Any:
    """vLLM's client of a server whose worker has ``engine``."""

    class InProcess(vllm.clients.HTTPVLLMWeightSyncClient):  # type: ignore[misc]
        def _post(self, path: str, json: Any = None) -> None:
            calls.append((path, json))
            body = loads(dumps(json))
            if path == "init_weight_transfer_engine":
                engine.init_transfer_engine(engine.parse_init_info(body["init_info"]))
            elif path == "update_weights":
                engine.update_weights(body["update_info"])
            else:
                getattr(engine, path)()

    return InProcess("http://server")
