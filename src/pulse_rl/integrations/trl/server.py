"""What a trainer asks of a vLLM server beside its weights: how it computes, what it serves, and completions."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any, NamedTuple

from ...errors import EngineError, EngineUnavailable

_DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": None}
_MOST_WORDS = 400


class Completion(NamedTuple):
    """The ``tokens`` that were sampled, and the log-probability of each (None where vLLM computed NaN)."""

    tokens: list[int]
    log_probabilities: list[float | None]


class VllmServer:
    """``url``: the server's, without a path. ``timeout_seconds`` holds for each request."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout_seconds

    def compute_dtype(self) -> str | None:
        """The dtype of the server's weights as `Publisher.publish` takes it; None for FP32."""
        facts = self._ask("server_info?config_format=json")
        name = str(facts["vllm_config"]["model_config"]["dtype"])
        if name not in _DTYPES:
            raise EngineError(f"the server at {self.url} computes in {name}", hint="Start it with --dtype bfloat16.")
        return _DTYPES[name]

    def weight_version(self) -> str:
        """The tag of what is generated now: a version's number once it was synced."""
        return str(self._ask("weight_info")["weight_version"])

    def model(self) -> str:
        """The name under which the server serves its model."""
        return str(self._ask("v1/models")["data"][0]["id"])

    def complete(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> list[Completion]:
        """One completion for each of ``prompts``, which are token ids."""
        wanted = {"n": 1, "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
        answer = self._ask("v1/completions", {"prompt": [list(prompt) for prompt in prompts], **sampling, **wanted})
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [Completion(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

    def _ask(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{route}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                words = " ".join(error.read().decode(errors="replace").split())[:_MOST_WORDS]
            if error.code == 404:
                hint = "Start vLLM 0.28 or later with VLLM_SERVER_DEV_MODE=1 in its environment."
                raise EngineError(f"{self.url} has no route /{route}", hint=hint) from None
            kind = EngineUnavailable if error.code >= 500 else EngineError  # a server whose engine dies says 500 first
            raise kind(f"{self.url} refused /{route} ({error.code}): {words}") from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise EngineUnavailable(f"no answer from {self.url}: {reason}") from None
