"""vLLM's OpenAI server as a process of its own, and requests to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .policy import PROMPT

START_SECONDS = 400.0


@contextmanager
def server(
    checkpoint: str,
    log: Path,
    *,
    tensor_parallel: int = 1,
    port: int | None = None,
    pulse: bool = True,
    dev: bool = True,
    options: Sequence[str] = (),
) -> Iterator[str]:
    """The URL of a server that is up. ``pulse``: with the backend; ``dev``: the weight routes;
    ``options``: more."""
    port = port or free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint]
    command += ["--port", str(port), "--host", "127.0.0.1"]
    command += ["--enforce-eager", "--max-model-len", "128"]
    command += ["--max-num-seqs", "8", "--served-model-name", "policy"]
    command += ["--tensor-parallel-size", str(tensor_parallel)]
    if pulse:
        command += ["--weight-transfer-config", '{"backend": "pulse"}']
    command += options
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": str(int(dev))}
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise AssertionError(f"the server did not start: {log.read_text()[-4000:]}")


def complete(url: str, tokens: int = 8, **options: Any) -> dict[str, Any]:
    """A greedy completion of PROMPT with the log-probabilities of its tokens."""
    body = {
        "model": "policy",
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return post(f"{url}/v1/completions", body | options)


def checksums(url: str) -> dict[str, str]:
    """vLLM's own SHA-256 of every live tensor under its runtime name."""
    sums: dict[str, str] = post(f"{url}/weight_checker", {"action": "checksum"})["checksums"]
    return sums


def post(url: str, body: dict[str, Any]) -> Any:
    """The answer to a JSON body; None where it is not JSON."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as found:
        is_json = found.headers.get_content_type() == "application/json"
        return json.loads(found.read()) if is_json else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
