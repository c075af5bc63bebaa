"""The parts of SGLang 0.5.23 through which an update goes, joined without its scheduler's loop.

SGLang's own: the HTTP application with its request models, the tokenizer's side of the requests and
its pause, the scheduler's manager of updates, the updater, the plugins, the model with its loader,
the groups of workers. Stand-ins: the loop that hands requests to the workers, the requests in
flight, and with them the flush of the cache. Nothing generates: the kernels need a GPU.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
from safetensors.torch import load_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.entrypoints import http_server
from sglang.srt.layers.rotary_embedding import base as rotary
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.managers.tp_worker import BaseTpWorker
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_model, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.aio_rwlock import RWLock
from sglang.srt.utils.weight_checker import WeightChecker

from pulse_rl.engines.live import LiveWeights

rotary._is_cpu = True  # else it imports a kernel; rotations have no weights


class Runner:
    """What SGLang's runner of a model is to updates."""

    check_weights = ModelRunner.check_weights
    server_args = SimpleNamespace(load_format="auto")

    def __init__(self, checkpoint: str) -> None:
        self.model_config = ModelConfig(checkpoint)
        self.model = loaded(self.model_config, checkpoint)
        self._weight_checker = WeightChecker(get_model=lambda: self.model)
        self.weight_updater = WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=self.model_config,
            custom_weight_loaders=get_model().custom_weight_loader,
            get_model=lambda: self.model,
            update_model_fields=lambda *args, **fields: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: self,
        )


def join(
    checkpoint: str, rank: int, size: int, meeting: str, options: dict[str, Any]
) -> ServerArgs:
    """Makes this process worker ``rank`` of ``size`` that meet in the file ``meeting``."""
    args = ServerArgs(
        model_path=checkpoint, device="cpu", tp_size=size, skip_tokenizer_init=True, **options
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    init_distributed_environment(
        world_size=size,
        rank=rank,
        local_rank=rank,
        backend="gloo",
        distributed_init_method=f"file://{meeting}",
    )
    initialize_model_parallel()
    return args


def loaded(config: ModelConfig, checkpoint: str) -> Qwen2ForCausalLM:
    """SGLang's model, with the weights of ``checkpoint`` by its own loader."""
    with set_default_torch_dtype(torch.bfloat16):
        model = Qwen2ForCausalLM(config.hf_config)
    model.load_weights(list(load_file(Path(checkpoint) / "model.safetensors").items()))
    return model.eval()


class Worker:
    """One worker of ``size``: a process of its own, as SGLang's groups are of a process."""

    def __init__(
        self, checkpoint: str, rank: int, size: int, meeting: str, options: dict[str, Any]
    ) -> None:
        load_plugins()
        self.args = join(checkpoint, rank, size, meeting, options)
        self.runner = Runner(checkpoint)
        self.running, self.paused = 0, ""
        worker = SimpleNamespace(
            model_runner=self.runner,
            deserialize_own_rank=lambda payloads: BaseTpWorker.deserialize_own_rank(
                worker, payloads
            ),
            weight_update_runners=lambda: [("target", self.runner)],
        )
        self.manager = SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=None,
            memory_saver_adapter=SimpleNamespace(pause=self.lose, resume=lambda tag: None),
            flush_cache=lambda empty_cache=True: self.flush(),
            is_fully_idle=lambda **how: self.running == 0,
            scheduler=SimpleNamespace(
                record_weight_version_change=lambda new_version: None,
                _engine_paused=False,
                disaggregation_mode=None,
            ),
        )

    @torch.inference_mode()
    def handle(self, request: Any) -> Any:
        """What SGLang's scheduler does with ``request``."""
        match request:
            case io_struct.BeginWeightUpdateReqInput():
                return self.manager.begin_weight_update(request)
            case io_struct.UpdateWeightsFromTensorReqInput():
                return self.manager.update_weights_from_tensor(request)
            case io_struct.EndWeightUpdateReqInput():
                return self.manager.end_weight_update(request)
            case io_struct.CheckWeightsReqInput():
                return self.manager.check_weights(request)
            case io_struct.ReleaseMemoryOccupationReqInput():
                return self.manager.release_memory_occupation(request)
            case io_struct.ResumeMemoryOccupationReqInput():
                return self.manager.resume_memory_occupation(request)
            case io_struct.FlushCacheReqInput():
                return io_struct.FlushCacheReqOutput(success=self.flush())
            case io_struct.UpdateWeightVersionReqInput():
                return io_struct.UpdateWeightVersionReqOutput()
            case io_struct.PauseGenerationReqInput():
                self.paused = request.mode
            case io_struct.ContinueGenerationReqInput():
                self.paused = ""
            case "break":
                LiveWeights.put = _lose
            case ("differing", checkpoint):
                fresh = dict(loaded(self.runner.model_config, checkpoint).named_parameters())
                live = dict(self.runner.model.named_parameters())
                return [
                    name
                    for name, weight in live.items()
                    if not torch.equal(bits(weight), bits(fresh[name]))
                ]
        return None

    def lose(self, tag: str) -> None:
        for weight in self.runner.model.parameters() if tag == "weights" else ():
            weight.data.fill_(float("nan"))

    def flush(self) -> bool:
        return self.running == 0 or self.paused == "retract"


def _lose(live: LiveWeights, change: Any, put: Any = LiveWeights.put) -> None:
    """Writes nothing, once."""
    LiveWeights.put = put
    raise RuntimeError("lost")


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().view(torch.int16)


class Tokenizer(TokenizerControlMixin):
    """The tokenizer's side, whose requests go to all workers at once; the answer is the first
    worker's."""

    pause_generation = TokenizerManager.pause_generation
    continue_generation = TokenizerManager.continue_generation
    record_config_updates = TokenizerManager.record_config_updates
    config_value = TokenizerManager.config_value
    mm_processor = None

    def __init__(self, first: Worker, others: list[Any]) -> None:
        self.first, self.others = first, others
        self.is_pause = False
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = RWLock()
        self.model_path = self.served_model_name = "model"
        self.is_generation = True
        self.server_args = first.args
        self.model_config = first.runner.model_config

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_communicator"):
            raise AttributeError(name)
        return self._everywhere

    async def _everywhere(self, request: Any) -> list[Any]:
        for other in self.others:
            other.send(request)
        return [self.first.handle(request)]

    async def _async_dispatch_to_scheduler(self, request: Any) -> None:
        await self._everywhere(request)

    def auto_create_handle_loop(self) -> None:
        pass

    def abort_request(self, *, abort_all: bool) -> None:
        self.first.running = 0


class Server:
    """``url``; ``ask`` reaches all workers beside the routes, between requests."""

    def __init__(self, url: str, first: Worker, others: list[Any]) -> None:
        self.url, self.first, self.others = url, first, others

    def ask(self, request: Any) -> list[Any]:
        for other in self.others:
            other.send(request)
        answers = [self.first.handle(request)]
        if isinstance(request, tuple):
            answers += [other.recv() for other in self.others]
        return answers


@contextmanager
def serving(
    checkpoint: str, size: int, folder: Path, port: int, **options: Any
) -> Iterator[Server]:
    """A server of ``size`` workers. Once a process: SGLang's groups are."""
    meeting = str(folder / "meeting")
    spawn = multiprocessing.get_context("spawn")
    others, processes = [], []
    for rank in range(1, size):
        here, there = spawn.Pipe()
        arguments = (there, checkpoint, rank, size, meeting, options)
        processes.append(spawn.Process(target=_follow, args=arguments, daemon=True))
        processes[-1].start()
        others.append(here)
    first = Worker(checkpoint, 0, size, meeting, options)
    manager = Tokenizer(first, others)
    http_server.set_global_state(http_server._GlobalState(manager, None, {}))
    config = uvicorn.Config(
        http_server.app, host="127.0.0.1", port=port, lifespan="off", log_level="warning"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Server(f"http://127.0.0.1:{port}", first, others)
    server.should_exit = True
    thread.join()
    for other, process in zip(others, processes, strict=True):
        other.send(None)
        process.join()


def _follow(requests: Any, *arguments: Any) -> None:
    worker = Worker(*arguments)
    while (request := requests.recv()) is not None:
        answer = worker.handle(request)
        if isinstance(request, tuple):
            requests.send(answer)
