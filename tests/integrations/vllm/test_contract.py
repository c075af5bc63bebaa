"""Both sides of vLLM's weight transfer over the contract of released versions, which
`make vllm-contract` unpacks; stand-ins for the rest of vLLM are in contract.py. `make test-vllm`
has a real vLLM 0.32."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from pulse_rl import State, state_root
from pulse_rl.errors import PulseError
from pulse_rl.follow.checkpoint import save
from tests.integrations.engines.world import SHAPES, Model
from tests.support.trainers import Trainer, together
from tools.vllm_contract import FOLDER, VERSIONS, WORKER, imported

from .contract import TRANSFER, client_of, contract, engine_of, require_unpacked


def transfer(vllm: SimpleNamespace, folder: Path, version: str) -> None:
    """Two updates, from vLLM's trainer to vLLM's worker."""
    torch.manual_seed(1)
    policy = nn.ParameterDict({name: torch.randn(of).bfloat16() for name, of in SHAPES.items()})
    model, calls, weights = Model(), list[tuple[str, Any]](), dict(policy.named_parameters())
    save(folder / "base.safetensors", State.of(dict(weights)))
    model.load_weights(weights.items())
    engine = engine_of(vllm, model, folder / "base.safetensors")
    info = vllm.trainer.PulseTrainerInitInfo(str(folder / "store"), "policy", rank=0)
    trainer = vllm.factory.WeightTransferTrainerFactory.trainer_init(
        *(("pulse", "its config", info) if version < "0.27" else (info,)),
        client=client_of(vllm, engine, calls),
        source=vllm.base.ModuleSource(policy),
    )
    try:
        for sent in range(2):
            with torch.no_grad():
                policy["gate"][sent] += 1
            trainer.send_weights()
            fresh = Model()
            fresh.load_weights(weights.items())
            assert all(map(torch.equal, model.parameters(), fresh.parameters()))
            tag = None if version < "0.28" else {"weight_version": str(sent)}
            assert calls[-1] == ("finish_weight_update", tag)
    finally:
        trainer.shutdown()
        engine.shutdown()


@pytest.mark.parametrize("version", VERSIONS)
def test_released_contracts(version: str, tmp_path: Path) -> None:
    with contract(version) as vllm:
        transfer(vllm, tmp_path, version)


#: Changes of what this package uses: of which file, what, into what.
CHANGES = [
    ("base", "def iter_full", "def iter_whole"),
    ("base", "is_sender: bool = True", "sends: bool = True"),
    ("base", "class TrainerInitInfo", "class TrainerInit"),
    ("base", "def parse_init_info", "def parse_init"),
    ("base", "def receive_weights", "def take_weights"),
    ("base", "def shutdown", "@abstractmethod\n    def teleport(self): ...\n    def shutdown"),
    ("factory", "def register_engine", "def register"),
    ("factory", "engine_cls(config, vllm_config", "engine_cls(vllm_config, config"),
    ("clients", "def finish_weight_update", "def end_weight_update"),
    ("clients", '"update_weights"', '"update"'),
]


@pytest.mark.parametrize(("file", "old", "new"), CHANGES)
def test_a_changed_contract_is_noticed(file: str, old: str, new: str, tmp_path: Path) -> None:
    newest = [*VERSIONS][-1]

    def change(name: str, text: str) -> str:
        assert name != file or old in text
        return text.replace(old, new) if name == file else text

    found = (PulseError, TypeError, AttributeError, ImportError, LookupError)
    with pytest.raises(found), contract(newest, change) as vllm:
        transfer(vllm, tmp_path, newest)


#: Not in all versions, and not needed.
OPTIONAL = {"is_deferred_attention_layer", "OnlineLinearBase"}
#: What vLLM's worker calls of an engine, or reads.
CALLED = {
    *("parse_init_info", "init_transfer_engine", "start_weight_update", "update_weights"),
    *("finish_weight_update", "shutdown", "supports_draft_weight_update"),
    *("set_weight_update_target", "reset_weight_update_target"),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_imported_and_called(version: str) -> None:
    require_unpacked(version)
    wheel = FOLDER / version

    def has(module: str, name: str) -> bool:
        """Whether the module names it, or a module of this name lies below."""
        place = wheel / module.replace(".", "/")
        named = [
            file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()
        ]
        below = (place / f"{name}.py").exists() or (place / name / "__init__.py").exists()
        return below or any(re.search(rf"\b{name}\b", file.read_text()) for file in named)

    missing = {
        name for module, name in [*imported(), (TRANSFER, "renamed")] if not has(module, name)
    }
    assert missing - {"renamed"} <= (OPTIONAL if version < "0.29" else set())
    assert "renamed" in missing
    called = re.findall(r"weight_transfer_engine\.(\w+)", (wheel / WORKER).read_text())
    assert {*called} == CALLED


def _sharded(trainer: Trainer) -> list[str]:
    """What one of four ranks reads of sources, or how it is refused. A mesh of two by two cuts rows
    and columns of some tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    trainer.connect("ranks")
    mesh, seen = init_device_mesh("cpu", (2, 2)), list[str]()
    whole = {f"w{n}": torch.arange(3.0 * n).view(n, 3).bfloat16() for n in (1, 6, 7, 8, 9)}
    cuts = [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1)), [Shard(0)] * 2]
    model = nn.ParameterDict(whole)
    for name, cut in zip(whole, cuts, strict=False):
        model[name] = nn.Parameter(distribute_tensor(whole[name], mesh, cut))
    log, logged = logging.getLogger("pulse_rl.engines.vllm.trainer"), logging.Handler()
    logged.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(logged)
    log.setLevel(logging.INFO)
    with contract("0.33.0") as vllm:
        base = vllm.base

        class Mesh(base.ModuleSource):  # type: ignore[misc]
            def iter_local(self) -> Any:
                seen.append("local")
                return super().iter_local()

            def iter_full(self) -> Any:
                seen.append("full")
                return super().iter_full()

        class Unknown(Mesh):
            """Placed as this package does not know it."""

            @cached_property
            def metadata(self) -> Any:
                strided = type("Strided", (base.Shard,), {})(0)
                first, *others = super().metadata
                return [replace(first, placements=(strided, strided)), *others]

        class Short(Mesh):
            def iter_local(self) -> Any:
                return ((name, part[trainer.rank // 3 :]) for name, part in super().iter_local())

        class Stages(Mesh):
            """Each rank has a tensor or two of its own."""

            @cached_property
            def metadata(self) -> Any:
                of = zip(whole.items(), [0, 1, 2, 3, 1], strict=True)
                return [base.ParamMeta(n, t.dtype, t.shape, owners=(k,)) for (n, t), k in of]

            def iter_local(self) -> Any:
                return ((name, whole[name]) for name in self.owned_names(trainer.rank))

        def send(kind: type, sharded: bool) -> None:
            info = vllm.trainer.PulseTrainerInitInfo(
                f"{trainer.folder}/{kind} {sharded}", "policy", rank=trainer.rank, sharded=sharded
            )
            client = client_of(vllm, Mock(), []) if trainer.rank == 0 else None
            engine = vllm.trainer.PulseTrainerEngine.trainer_init(
                info, client=client, source=kind(model)
            )
            try:
                engine.send_weights()
            finally:
                engine.shutdown()
            root = engine.published.root if engine.published else None
            assert root == (state_root(whole) if sharded or trainer.rank == 0 else None)

        for kind, sharded in ((Mesh, True), (Mesh, False), (Unknown, True), (Stages, True)):
            send(kind, sharded)
        for kind, sharded in ((Short, True), (Stages, False)):
            try:
                send(kind, sharded)
            except PulseError as error:
                seen.append(str(error))
    return seen


@pytest.mark.slow
def test_ranks_publish_their_parts() -> None:
    require_unpacked("0.33.0")
    for seen in together(_sharded, 4):
        (*how, why, fallback, stages, short, not_owned) = seen
        assert (how, fallback, stages) == (["local", "full"], "full", "local")
        assert re.search(r"whole tensors.*'w1' is placed as Strided\(dim=0\)", why)
        assert "gives [5, 1] of 'w6', but its metadata declares [6, 1]" in short
        assert not_owned == "rank 0 does not own 'w6'"
