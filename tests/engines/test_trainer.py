"""A trainer and a server that speak vLLM's own API, with the backend ``pulse``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from pulse_rl import Signer, Subscriber, state_root
from pulse_rl.engines.transport import Client
from pulse_rl.engines.vllm.trainer import PulseTrainerInitInfo

from .policy import Policy
from .server import complete, free_port, server


def test_a_trainer_of_vllms_own_api(policy: Policy, tmp_path: Path, signer: Signer) -> None:
    store, port = str(tmp_path / "own"), free_port()
    info = PulseTrainerInitInfo(store, "policy", publisher={"signer": signer}, rank=0)
    client = HTTPVLLMWeightSyncClient(f"http://127.0.0.1:{port}")
    source = ModuleSource(policy.model)

    def sent(engine: object) -> None:
        policy.step()
        engine.send_weights()  # type: ignore[attr-defined]
        version = engine.published.version  # type: ignore[attr-defined]
        with Subscriber(store, stream="policy", trusted_keys=[signer.public_key]) as worker:
            worker.sync()
            assert (worker.version, worker.root) == (
                version,
                state_root(dict(policy.model.named_parameters())),
            )
        body = {"method": "pulse", "args": ["audit", engine._session.owner]}  # type: ignore[attr-defined]
        (status,) = Client(client.base_url, 60).post("collective_rpc", body).json()["results"]
        assert (status["version"], status["differing"]) == (version, [])
        assert complete(client.base_url)["choices"]

    with server(policy.checkpoint, tmp_path / "first.log", port=port):
        engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
        for _ in range(3):
            sent(engine)
        policy.model.model.norm.weight.data = torch.ones(
            64, dtype=torch.bfloat16
        )  # no engine takes this
        with pytest.raises(Exception, match=r"500|400"):
            engine.send_weights()
        policy.model.model.norm.weight.data = torch.ones(128, dtype=torch.bfloat16)
        sent(engine)
    with server(policy.checkpoint, tmp_path / "second.log", port=port):
        sent(engine)  # to an engine that was restarted
    engine.shutdown()
