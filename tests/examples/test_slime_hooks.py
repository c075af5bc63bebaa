"""slime's hooks, called as slime and its SGLang call them; what stands in for both is here."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from pulse_rl import Subscriber  # noqa: E402
from tests.support.commands import POLICY, Pulse  # noqa: E402


def hook(name: str) -> Any:
    """By import path, as both load it."""
    return getattr(import_module("examples.slime_hooks"), name)


def test_full_versions_reach_a_host_of_engines(
    pulse: Pulse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, trainer, host, local = (
        tmp_path / name for name in ("store", "trainer", "host", "local")
    )
    monkeypatch.setenv("PULSE_STORE", str(store))
    monkeypatch.setattr("examples.slime_hooks.WAIT_SECONDS", 0.0)
    monkeypatch.setattr("examples.slime_hooks._publisher", None)
    rank = 0
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    trainer.mkdir()
    hook("after_write")(
        SimpleNamespace(), str(trainer), []
    )  # as Miles does before the first version
    for number in (1, 2):
        written = trainer / f"weight_v{number:06d}"
        written.mkdir()
        save_file(
            {"w": torch.full((100,), number, dtype=torch.bfloat16)}, written / "model.safetensors"
        )
        (written / "config.json").write_text("{}")
        for rank in (1, 0):  # noqa: B007 (each rank calls it)
            hook("after_write")(SimpleNamespace(), str(written), [])
        shutil.rmtree(written)  # as slime does
        with pytest.raises(TimeoutError, match="pulse follow"):
            hook("before_read")(str(host), number)
        pulse("follow", store, *POLICY, "--out", host, "--layout", "slime", "--keep", 1, "--once")
        hook("before_read")(str(host), number)
        shutil.copytree(host / f"weight_v{number:06d}", local, dirs_exist_ok=True)
        assert (load_file(local / "model.safetensors")["w"] == number).all()
    assert [each.name for each in host.glob("weight*")] == ["weight_v000002"]
    with Subscriber(store, stream="policy") as worker:
        assert worker.stream.versions() == [0, 1]
