"""How a handle reaches an engine: the calls that all forms of an engine have, and the HTTP client
of those that are servers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, NamedTuple, Protocol, TypedDict
from urllib.parse import urlencode, urlsplit

from .. import errors
from .._util.addresses import shown
from .._util.settings import short_int
from ..errors import EngineError, EngineUnavailable, InputError, PulseError

#: What a worker says of itself; see `worker.Worker.answer`.
Status = dict[str, Any]
#: The part of an engine's memory that updates are written to, as engines name it.
WEIGHTS = "weights"
_MAX_WORDS = 400
_JSON = {"Content-Type": "application/json"}


class SubscriberOptions(TypedDict, total=False):
    """Settings of `pulse_rl.Subscriber` that a handle passes on to the engine's workers."""

    base: str | None
    trusted_keys: Collection[str] | None
    stream_id: str | None
    allow_recreated: bool
    cache: str | None


@dataclass
class InitInfo:
    """What a handle tells an engine's workers. ``store``: its address; ``stream``: its name;
    ``base``: a checkpoint's path (None: the one that the engine was started from); ``follow``:
    whether new versions are staged without being asked for; ``audit_every``: updates from one audit
    to the next; `SubscriberOptions`; ``owner``: any string that stands for who drives the engine;
    ``version``: which one is staged until another is asked for (None: the newest)."""

    store: str
    stream: str
    follow: bool = True
    audit_every: int = 100
    base: str | None = None
    trusted_keys: Collection[str] | None = None
    stream_id: str | None = None
    allow_recreated: bool = False
    cache: str | None = None
    owner: str = ""
    version: int | None = None


class Generated(NamedTuple):
    """What an engine has generated. ``tags``: of the weights and the index of the first token that
    they generated, in their order; None, if the engine does not say it."""

    tokens: list[int]
    logprobs: list[float | None]
    tags: list[tuple[str, int]] | None


def tags_of(spans: Iterable[Mapping[str, Any]] | None) -> list[tuple[str, int]] | None:
    """As vLLM and SGLang report them, by token index."""
    return None if spans is None else [(span["version"], span["start"]) for span in spans]


class EngineTransport(Protocol):
    """An engine's calls, with what they are for an engine that neither pauses nor leaves anything
    open. They raise EngineError, or whatever the engine raises."""

    def init(self, init_info: dict[str, Any]) -> None: ...

    def pulse(self, action: str, owner: str, version: int | None = None) -> list[Status]:
        """The answers of all workers."""

    def recover(self) -> None:
        """Ends what a handle that died has left: an update that it began, a pause."""
        self.resume()

    def pause(self, mode: str) -> None:
        """``mode``: what becomes of the requests in flight."""
        return

    def resume(self) -> None:
        """Ends the pause."""
        return

    def start(self) -> None: ...

    def update(self, version: int | None, owner: str) -> None: ...

    def finish(self, weight_version: str) -> None: ...

    def tag(self, weight_version: str) -> None:
        """Has later outputs carry this tag, without an update."""
        self.start()
        self.finish(weight_version)

    def generate(self, prompt: list[int], sampling: dict[str, Any]) -> Generated:
        """One completion of the token ids ``prompt``. ``sampling``: as the engine has it, but for
        the names "max_tokens" and "seed"."""

    def reset_prefix_cache(self, running: bool) -> bool:
        """Whether nothing of it is left. ``running``: requests in flight start over with the new
        weights."""


def asleep() -> EngineUnavailable:
    return EngineUnavailable(
        "the engine sleeps, without its weights in memory",
        hint="Wake it up, its weights at least, and sync then.",
    )


def raise_for_status(field: str, statuses: list[Status]) -> None:
    """Raises what a worker reports, as the error that it was there."""
    for status in statuses:
        found = status.get(field)
        if found:
            kind = _KINDS.get(found["kind"], PulseError)
            raise kind(found["message"], hint=found["hint"])


_KINDS = {
    error.kind: error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, PulseError) and "kind" in vars(error)
}


class Answer(NamedTuple):
    """``status``: of HTTP."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The answer. Raises EngineError where it is no JSON."""
        try:
            return json.loads(self.body, parse_int=short_int)
        except (ValueError, RecursionError):
            raise EngineError(
                f"the engine answered with something else than JSON: {self.words!r}"
            ) from None

    @property
    def words(self) -> str:
        """What a refusal says, in one line."""
        try:
            message = json.loads(self.body)
            for key in ("error", "message"):
                if isinstance(message, dict):
                    message = message.get(key, message)
        except (ValueError, RecursionError):
            message = self.body.decode(errors="replace")
        return " ".join(str(message).split())[:_MAX_WORDS]


class Client:
    """``address``: the server's URL, without a path. ``timeout_seconds`` holds for each call.
    ``part``: of pulse in the server, without which it refuses calls with one of the words
    ``signs``; ``start``: how to start a server, for hints. Raises InputError."""

    def __init__(
        self,
        address: str,
        timeout_seconds: float,
        part: str = "pulse",
        signs: Collection[str] = (),
        start: str | None = None,
    ) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            raise InputError(
                f"{shown(address)!r} is no URL of a server", hint="Give it as http://host:port."
            )
        self.address = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._timeout = timeout_seconds
        self._part, self._signs, self._start = part, signs, start

    def call(self, route: str, body: object = None, query: Mapping[str, str] | None = None) -> Any:
        """What the server answers to `post`, None for nothing. Raises EngineError and
        EngineUnavailable."""
        return self.read(route, self.post(f"{route}?{urlencode(query)}" if query else route, body))

    def read(self, route: str, answer: Answer) -> Any:
        """What ``answer`` to ``route`` says, None for nothing. Raises EngineError for a refusal."""
        if answer.status in (404, 405):
            raise EngineError(f"{self.address} has no route /{route}", hint=self._start)
        if answer.status >= 300 and any(sign in answer.words for sign in self._signs):
            raise EngineError(
                f"the server at {self.address} was not started with {self._part}", hint=self._start
            )
        if answer.status >= 300:
            raise EngineError(f"{self.address} refused /{route} ({answer.status}): {answer.words}")
        return answer.json() if answer.body else None

    def post(self, route: str, body: object = None) -> Answer:
        """Sends ``body`` as JSON. Raises EngineUnavailable without an answer."""
        data = b"" if body is None else json.dumps(body).encode()
        return self._ask(
            urllib.request.Request(f"{self.address}/{route}", data, _JSON, method="POST")
        )

    def get(self, route: str) -> Answer:
        """Raises EngineUnavailable without an answer."""
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
