"""A server's routes, as far as engines agree on them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ...errors import EngineError, EngineUnavailable, InputError

_MOST_WORDS = 400


class Answer(NamedTuple):
    """``status``: of HTTP."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The answer. Raises EngineError where it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise EngineError(f"the engine answered with something else than JSON: {self.words!r}") from None

    @property
    def words(self) -> str:
        """What a refusal says, in one line."""
        try:
            answer = json.loads(self.body)
            told = answer.get("error", answer.get("message", answer)) if isinstance(answer, dict) else answer
            message = told["message"] if isinstance(told, dict) and "message" in told else told
        except ValueError:
            message = self.body.decode(errors="replace")
        return " ".join(str(message).split())[:_MOST_WORDS]


class Client:
    """``address``: the server's URL, without a path. ``timeout_seconds`` holds for each call. Raises InputError."""

    def __init__(self, address: str, timeout_seconds: float) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InputError(f"{address!r} is no URL of a server", hint="Give it as http://host:port.")
        self.address = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._timeout = timeout_seconds

    def post(self, route: str, body: object = None) -> Answer:
        """Sends ``body`` as JSON. Raises EngineUnavailable where nobody answers."""
        data = b"" if body is None else json.dumps(body).encode()
        return self._ask(urllib.request.Request(f"{self.address}/{route}", data, _JSON, method="POST"))

    def get(self, route: str) -> Answer:
        """Raises EngineUnavailable where nobody answers."""
        return self._ask(urllib.request.Request(f"{self.address}/{route}"))

    def _ask(self, request: urllib.request.Request) -> Answer:
        try:
            try:
                with _OPENER.open(request, timeout=self._timeout) as answer:
                    return Answer(answer.status, answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    return Answer(error.code, error.read())
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise EngineUnavailable(f"no answer from {self.address}: {reason}") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A POST that is sent elsewhere would arrive there as a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)
_JSON = {"Content-Type": "application/json"}
