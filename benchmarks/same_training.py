"""The same training twice: TRL's GRPO with vLLM, weights by TRL's own sync and by Pulse; equal to
the bit, or not.

    python -m benchmarks.same_training [--steps 200] [--seeds 0 1 2] [--out NAME] [--kill engine@5
    trainer@10 store@15]
        [--steps-per-generation 4]

Runs on a CPU in the environment of ``make test-vllm``. ``trl``: ``use_vllm=True,
vllm_mode="colocate"``; TRL's ``VLLMGeneration.sync_weights`` loads every parameter into an engine
in the trainer's process. (Its other mode, ``server``, needs NCCL and so GPUs.) ``pulse``:
``rollout_func=pulse_rollout(...)``; the engine is vLLM's server, a process of its own, and the
weights go through a store. All else is the same: one thread a process, and one request at a time
with a seed of its own, since vLLM's arithmetic depends on what else is in a batch.

A JSON line a step: reward, loss, entropy, KL and the norm of the gradient as TRL logs them;
``tokens``, a SHA-256 of the step's completions, and ``logprobs``, one of their log-probabilities as
vLLM computed them; ``trainer``, a SHA-256 of the weights in BF16 as vLLM names and fuses them, and
``engine``, the same of vLLM's own checksums of what it computes with; ``root``, the root of the
version in the stream. Where two lines of a step and seed differ in anything but seconds, bytes and
``root``, or an engine's weights from the trainer's, the command says so and fails.

``--steps-per-generation``: TRL's setting of that name. Weights are synced, and completions made,
once in so many steps: the last of them learns from what is one step less old, a stated staleness. A
line's digests are then of its generation, and only the lines of generations have a reward.

``--kill``: in the middle of the step, after the rollouts, by SIGKILL. The engine starts again from
its first checkpoint, the trainer from its own of the step before. The store is then a server of the
S3 protocol (moto, by ``--moto``) behind a proxy that refuses all requests for six seconds."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

TRANSPORTS = ("trl", "pulse")
STREAM = "policy"
SECONDS = ("sync_s", "step_s")
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
ENVIRONMENT |= {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
ENVIRONMENT |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
ENVIRONMENT |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
#: Of both engines. On a CPU vLLM packs weights, and then computes with the packed copies alone:
#: with the backend ``pulse`` it keeps them plain, without which TRL's own sync would change
#: nothing.
ENGINE = {
    "max_model_len": 128,
    "enforce_eager": True,
    "weight_transfer_config": {"backend": "pulse"},
}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps-per-generation", type=int, default=1)
    parser.add_argument(
        "--kill", nargs="+", default=[], metavar="WHAT@STEP", help="of the runs with Pulse"
    )
    parser.add_argument(
        "--moto", default=".venv/bin/python", help="a Python that has it, for store@STEP"
    )
    parser.add_argument(
        "--out", default="same_training", help="JSON lines, in OUT.trl.jsonl and OUT.pulse.jsonl"
    )
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.child:
        transport, seed, url, store, folder = arguments.child
        train(arguments, transport, int(seed), url, store, Path(folder))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the processes of a run end with it
    begin(arguments)
    lines = []
    for seed in arguments.seeds:
        for transport in TRANSPORTS:
            done = run(arguments, transport, seed)
            with Path(f"{arguments.out}.{transport}.jsonl").open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in done)
            lines += done
    found = differences(lines)
    print("\n".join(found) or f"equal: {len(lines)} steps in all", file=sys.stderr)
    if found:
        raise SystemExit(1)


def begin(arguments: argparse.Namespace) -> None:
    """Where and when, as the first line of each file."""
    from importlib.metadata import version

    from benchmarks.results import machine, revision

    names = ("trl", "transformers", "torch", "vllm-cpu")
    facts = {
        "command": f"python -m benchmarks.same_training {' '.join(sys.argv[1:])}",
        "revision": revision(),
    }
    facts |= {"date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine()}
    facts["packages"] = {name: version(name) for name in names}
    for transport in TRANSPORTS:
        Path(f"{arguments.out}.{transport}.jsonl").write_text(json.dumps(facts) + "\n")


def differences(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is not equal: between the runs of a seed, between trainer and engine, or in a step that
    was done twice."""
    first: dict[tuple[int, int], Mapping[str, Any]] = {}
    found = []
    for line in lines:
        at = (line["seed"], line["step"])
        seen = first.setdefault(at, line)
        unlike = [
            k
            for k in line
            if k not in (*SECONDS, "transport", "root", "bytes") and line[k] != seen[k]
        ]
        if unlike:
            found.append(f"seed {at[0]}, step {at[1]}: {', '.join(unlike)}")
        if line["trainer"] != line["engine"]:
            found.append(
                f"seed {at[0]}, step {at[1]}, {line['transport']}: the engine has other weights"
            )
    return found


# -- one run: its processes


def run(arguments: argparse.Namespace, transport: str, seed: int) -> list[dict[str, Any]]:
    """The lines of one training, in the order of its steps; those that were done twice are there
    twice."""
    from examples.trl_grpo import save_policy

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        save_policy(str(folder / "policy"))
        url, engine, proxy, store = "", None, None, str(folder / "store")
        if transport == "pulse":
            engine = stack.enter_context(Server(folder))
            url = engine.url
            if "store@" in " ".join(arguments.kill):
                proxy = stack.enter_context(s3(arguments.moto))
                store = f"s3://bucket/run?endpoint={proxy.endpoint}&region=us-east-1"
        command = [
            sys.executable,
            "-m",
            "benchmarks.same_training",
            "--steps",
            str(arguments.steps),
        ]
        command += ["--learning-rate", str(arguments.learning_rate)]
        command += ["--steps-per-generation", str(arguments.steps_per_generation)]
        command += ["--kill", *arguments.kill] if engine and arguments.kill else []
        command += ["--child", transport, str(seed), url, store, str(folder)]
        with (folder / "trainer.log").open("ab") as output:
            while True:
                trainer = subprocess.Popen(
                    command, stdout=output, stderr=output, env=os.environ | ENVIRONMENT
                )
                try:
                    while trainer.poll() is None:
                        time.sleep(0.2)
                        if engine is not None and engine.process.poll() is not None:
                            engine.start()
                        if proxy is not None and (folder / "store-away").exists():
                            cut(proxy, 6.0)
                            (folder / "store-away").unlink()
                finally:
                    trainer.kill()
                if trainer.returncode != -signal.SIGKILL:
                    break
        if trainer.returncode:
            raise SystemExit((folder / "trainer.log").read_text()[-6000:])
        lines = [json.loads(line) for line in (folder / "lines").read_text().splitlines()]
        waits = (folder / "trainer.log").read_text().count("; the training waits, ")
    took = time.perf_counter() - began
    print(
        f"{transport}, seed {seed}: {arguments.steps} steps, {took:.0f} s, {waits} waits",
        file=sys.stderr,
        flush=True,
    )
    return lines


class Server:
    """vLLM's server of the policy in ``folder``, at an address that stays."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Server:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(self._folder / "policy"),
        ]
        command += [
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
            "--logprobs-mode",
            "processed_logprobs",
        ]
        for name, value in ENGINE.items():
            command += [
                f"--{name.replace('_', '-')}",
                *([] if value is True else [json.dumps(value)]),
            ]
        with (self._folder / "server.log").open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=os.environ | ENVIRONMENT,
                start_new_session=True,
            )
        (self._folder / "server.pid").write_text(str(self.process.pid))
        until_up(
            urllib.request.Request(f"{self.url}/health"),
            self.process,
            (self._folder / "server.log").read_text,
        )


@contextmanager
def s3(python: str) -> Iterator[Any]:
    """A server of the S3 protocol with one bucket, and the proxy before it."""
    from tests.support.proxy import Proxy

    port = free_port()
    server = subprocess.Popen(
        [python, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        until_up(
            urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT"),
            server,
            lambda: f"{python} has no moto",
        )
        proxy = Proxy(f"http://127.0.0.1:{port}")
        yield proxy
        proxy.close()
    finally:
        server.kill()
        server.wait()


def cut(proxy: Any, seconds: float) -> None:
    from tests.support.proxy import Rule

    proxy.add(Rule("refuse", times=1_000_000))
    threading.Timer(seconds, proxy.heal).start()


def until_up(
    request: urllib.request.Request, process: subprocess.Popen[bytes], log: Callable[[], str]
) -> None:
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except OSError:
            if process.poll() is not None:
                raise SystemExit(log()[-6000:]) from None
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


# -- one run: the trainer


def train(
    arguments: argparse.Namespace, transport: str, seed: int, url: str, store: str, folder: Path
) -> None:
    """Writes the lines. Goes on from a checkpoint where there is one."""
    import torch
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    from pulse_rl.frameworks.trl import pulse_rollout

    logging.basicConfig(format="%(name)s: %(message)s")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    kills = dict(reversed(word.split("@")) for word in arguments.kill)
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": arguments.steps,
        "seed": seed,
    }
    settings |= {
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": "constant",
        "beta": 0.04,
    }
    settings |= {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8}
    settings |= {"steps_per_generation": arguments.steps_per_generation}
    settings |= {
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    settings |= {
        "save_strategy": "steps" if kills else "no",
        "save_steps": 1,
        "save_total_limit": 2,
    }
    watch = Watch(transport, seed, url, folder, kills)
    by_pulse: Any = None
    if transport == "trl":
        settings |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": ENGINE["max_model_len"],
        }
        settings["vllm_importance_sampling_correction"] = False  # which `use_vllm` alone has
        vllm_generation.LLM = partial(
            vllm_generation.LLM, **ENGINE
        )  # TRL has no settings for these
    else:
        by_pulse = partial(watch.by_pulse, pulse_rollout(url, store, STREAM))
    trainer = GRPOTrainer(
        model=str(folder / "policy"),
        reward_funcs=numbers,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(
            [{"prompt": f"w{n + 3} w{n + 4} w{n + 5}"} for n in range(200)]
        ),
        processing_class=PreTrainedTokenizerFast.from_pretrained(
            folder / "policy", padding_side="left"
        ),
        rollout_func=by_pulse,
    )
    if by_pulse is None:
        engine = trainer.vllm_generation
        engine.generate = partial(watch.by_trl, trainer, engine.generate)
        engine.sync_weights = partial(watch.timed, engine.sync_weights)
    trainer.add_callback(watch.callback())
    trainer.train(
        resume_from_checkpoint=(folder / "out").is_dir()
        and any((folder / "out").glob("checkpoint-*"))
    )


def numbers(completions: list[str], **_: Any) -> list[float]:
    """The reward: the mean of the words' numbers, 0 to 1."""
    found = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions]
    return [sum(row) / max(len(row), 1) / 255 for row in found]


class Watch:
    """Gives each request its seed, and notes each step."""

    def __init__(
        self, transport: str, seed: int, url: str, folder: Path, kills: Mapping[str, str]
    ) -> None:
        self._line: dict[str, Any] = {"transport": transport, "seed": seed}
        self._url, self._folder, self._kills = url, folder, kills
        self._began = time.perf_counter()
        self._sync = 0.0

    def _seed(self, trainer: Any, number: int) -> dict[str, int]:
        return {"seed": (1000 * self._line["seed"] + trainer.state.global_step) * 100 + number}

    def timed(self, work: Callable[[], Any]) -> None:
        began = time.perf_counter()
        work()
        self._sync = time.perf_counter() - began

    def by_trl(self, trainer: Any, generate: Any, prompts: Any, images: Any, **_: Any) -> Any:
        engine, rows = trainer.vllm_generation, []
        for number, prompt in enumerate(prompts):
            engine.generation_kwargs = self._seed(trainer, number)
            rows.append(generate([prompt], images, 1))
        found = [[part[0] for part in column] for column in zip(*rows, strict=True)]
        sums = engine.llm.collective_rpc("compute_weight_checksums")[0]
        self._note(trainer, found[1], [[x for (x,) in row] for row in found[2]], sums)
        return found

    def by_pulse(self, pulse: Any, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for number, prompt in enumerate(prompts):
            trainer.args.generation_kwargs = self._seed(trainer, number)
            for name, rows in pulse([prompt], trainer).items():
                found.setdefault(name, []).extend(rows)
        request = urllib.request.Request(
            f"{self._url}/weight_checker",
            b'{"action": "checksum"}',
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            sums = json.loads(answer.read())["checksums"]
        done, moved = pulse.published, pulse.synced
        self._sync = done.seconds
        if moved is not None and moved.version == done.version:
            self._sync += moved.fetch_seconds + moved.verify_seconds + moved.pause_seconds
        self._note(trainer, found["completion_ids"], found["logprobs"], sums)
        self._line |= {"root": done.root[:16], "bytes": done.patch_bytes or done.anchor_bytes}
        return found

    def _note(self, trainer: Any, tokens: Any, logprobs: Any, sums: dict[str, str]) -> None:
        import torch

        self._line |= {
            "tokens": _digest([list(row) for row in tokens]),
            "logprobs": _digest([list(row) for row in logprobs]),
            "trainer": _digest(fused(trainer.model)),
            "engine": _digest({name.rpartition(":")[2]: value for name, value in sums.items()}),
        }
        # TRL shuffles by torch's global generator, from which an engine in the same process draws
        # as well.
        torch.manual_seed(self._seed(trainer, 0)["seed"])
        step = str(trainer.state.global_step + 1)
        what, done = self._kills.get(step), self._folder / f"killed-{step}"
        if what and not done.exists():
            done.touch()
            if what == "engine":
                os.killpg(int((self._folder / "server.pid").read_text()), signal.SIGKILL)
            elif what == "trainer":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                away = self._folder / "store-away"
                away.touch()
                while away.exists():
                    time.sleep(0.01)

    def callback(self) -> Any:
        from transformers import TrainerCallback

        class Lines(TrainerCallback):
            def on_log(
                inner,  # noqa: N805
                args: Any,
                state: Any,
                control: Any,
                logs: Any = None,
                **kwargs: Any,
            ) -> None:
                if "loss" not in (logs or {}):
                    return
                now = time.perf_counter()
                figures = {
                    name: logs[name]
                    for name in ("reward", "loss", "entropy", "kl", "grad_norm")
                    if name in logs
                }
                seconds = {"sync_s": round(self._sync, 3), "step_s": round(now - self._began, 3)}
                with (self._folder / "lines").open("a") as file:
                    file.write(
                        json.dumps(self._line | {"step": state.global_step} | figures | seconds)
                        + "\n"
                    )
                self._began = now

        return Lines()


def fused(model: Any) -> dict[str, str]:
    """SHA-256 of the weights in BF16, by torch's own cast, as vLLM names and fuses those of a
    Qwen2."""
    import torch

    parts: dict[str, list[torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        for one, whole in {
            "q": "qkv",
            "k": "qkv",
            "v": "qkv",
            "gate": "gate_up",
            "up": "gate_up",
        }.items():
            name = name.replace(f".{one}_proj.", f".{whole}_proj.")
        parts.setdefault(name, []).append(weight.detach().to(torch.bfloat16))
    wholes = {
        name: torch.cat(found).contiguous().view(-1).view(torch.uint8)
        for name, found in parts.items()
    }
    return {name: hashlib.sha256(whole.numpy()).hexdigest() for name, whole in wholes.items()}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
