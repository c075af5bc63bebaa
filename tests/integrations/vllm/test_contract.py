"""An engine of another contract is refused when it is made, not when it is used."""

from __future__ import annotations

import abc
from types import SimpleNamespace

import pytest

from pulse_rl.errors import EngineError
from pulse_rl.integrations.vllm.plugin import require_fixed_places, require_known


class Known(abc.ABC):
    def __init__(self, config: object, vllm_config: object, device: object, model: object) -> None:
        self.model = model

    @abc.abstractmethod
    def init_transfer_engine(self, init_info: object) -> None: ...

    @abc.abstractmethod
    def start_weight_update(self) -> None: ...

    @abc.abstractmethod
    def receive_weights(self, update_info: object) -> None: ...

    @abc.abstractmethod
    def finish_weight_update(self) -> None: ...

    @abc.abstractmethod
    def shutdown(self) -> None: ...


class AsksForMore(Known):
    @abc.abstractmethod
    def teleport(self) -> None: ...


class WithoutAModel(Known):
    def __init__(self, config: object, parallel_config: object) -> None:
        pass


def test_contracts() -> None:
    require_known(Known, "0.32")
    with pytest.raises(EngineError, match=r"vLLM 9\.9 is not known: teleport"):
        require_known(AsksForMore, "9.9")
    with pytest.raises(EngineError, match=r"WithoutAModel\(config, parallel_config\)"):
        require_known(WithoutAModel, "0.20")


def test_what_moves_weights_is_refused() -> None:
    def config(group: int = 0, **changes: object) -> SimpleNamespace:
        parallel = SimpleNamespace(enable_eplb=False, enable_elastic_ep=False)
        offload = SimpleNamespace(offload_backend="auto", prefetch=SimpleNamespace(offload_group_size=group))
        facts = {"parallel_config": parallel, "offload_config": offload, "lora_config": None}
        return SimpleNamespace(**(facts | changes))

    require_fixed_places(config())
    refused = {
        "enable-eplb": config(parallel_config=SimpleNamespace(enable_eplb=True)),
        "enable-elastic-ep": config(parallel_config=SimpleNamespace(enable_elastic_ep=True)),
        "offload-group-size": config(group=2),
        "enable-lora": config(lora_config=object()),
    }
    for option, found in refused.items():
        with pytest.raises(EngineError, match=option):
            require_fixed_places(found)
