"""The trainer's side under the base classes of vLLM 0.26 and of 0.27 to 0.32, for which stand-ins
do: as much of both as `pulse_rl.engines.vllm.trainer` takes from them. `make test-vllm` has
the real 0.32."""

from __future__ import annotations

import importlib
import sys
from abc import ABC
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import pytest
import torch

from pulse_rl import Subscriber, state_root
from pulse_rl.errors import InputError

A = TypeVar("A")
B = TypeVar("B")
BASE, FACTORY = (f"vllm.distributed.weight_transfer.{name}" for name in ("base", "factory"))
TRAINER = "pulse_rl.engines.vllm.trainer"


@dataclass
class InitInfo:
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class Of026(ABC, Generic[A, B]):
    def __init__(self, config: Any, *, client: Any, source: Any, is_sender: bool = True) -> None:
        self.config, self.client, self.source, self.is_sender = config, client, source, is_sender


class Of027(ABC, Generic[A]):
    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:
        self.config, self.client, self.source, self.is_sender = None, client, source, is_sender


class Factory:
    def __init__(self) -> None:
        self._registry: dict[str, Any] = {}

    def register_engine(self, name: str, module: str, cls: str) -> None:
        self._registry[name] = lambda: getattr(importlib.import_module(module), cls)


class Client:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.calls.append(info["stream"])

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update: dict[str, Any]) -> None:
        self.calls.append(update["version"])

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


class Tagging(Client):
    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {weight_version}")


@pytest.mark.parametrize(
    ("base", "given", "client", "tag"),
    [(Of026, {"config": "its own"}, Client(), ""), (Of027, {}, Tagging(), " 0")],
)
def test_both_released_shapes(
    base: type,
    given: dict[str, str],
    client: Client,
    tag: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {
        "TrainerWeightTransferEngine": base,
        "TrainerInitInfo": InitInfo,
        "WeightSource": object,
    }
    trainers = Factory()
    for path in ("vllm", "vllm.distributed", BASE.rpartition(".")[0], BASE, FACTORY):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    for name, value in names.items():
        monkeypatch.setattr(sys.modules[BASE], name, value, raising=False)
    monkeypatch.setattr(
        sys.modules[FACTORY], "WeightTransferTrainerFactory", trainers, raising=False
    )
    monkeypatch.setattr(
        sys.modules[BASE.rpartition(".")[0]], "factory", sys.modules[FACTORY], raising=False
    )
    monkeypatch.delitem(sys.modules, TRAINER, raising=False)
    monkeypatch.setitem(
        sys.modules, TRAINER, importlib.import_module(TRAINER)
    )  # to be forgotten afterwards

    info = sys.modules[TRAINER].PulseTrainerInitInfo(str(tmp_path), "policy", rank=0)
    kind, weight = trainers._registry["pulse"](), torch.ones(4, dtype=torch.bfloat16)
    engine = kind.trainer_init(init_info=info, client=client, source=[("w", weight)], **given)
    engine.send_weights()
    engine.shutdown()
    assert client.calls == ["policy", "start", 0, f"finish{tag}"]
    assert engine.config == given.get("config")
    with Subscriber(str(tmp_path), stream="policy") as worker:
        worker.sync()
        assert worker.root == state_root({"w": weight})
    with pytest.raises(InputError, match="source"):
        kind.trainer_init(init_info=info, client=client, source=None, **given)
