"""How whoever drives an SGLang server gets a handle on it."""

from __future__ import annotations

from collections.abc import Collection

from ..engines.handle import EngineHandle, InFlight
from ..engines.transport import InitInfo
from .http import Server


def connect(
    url: str,
    *,
    store: str,
    stream: str,
    base: str | None = None,
    trusted_keys: Collection[str] | None = None,
    stream_id: str | None = None,
    allow_recreated: bool = False,
    cache: str | None = None,
    follow: bool = True,
    in_flight: InFlight = "keep",
    audit_every: int = 100,
    timeout_seconds: float = 600.0,
) -> EngineHandle:
    """A handle on an SGLang server that was started with ``--custom-weight-loader pulse_rl.integrations.sglang.load``.

    ``url``: the server's. ``in_flight``: what becomes of requests that a sync meets: they are kept, and go on with the
    new weights from the start of their prompt; aborted; or waited for, in which case new ones wait. ``store``,
    ``stream``, ``base``, ``trusted_keys``, ``stream_id``, ``allow_recreated``, ``cache``, ``follow``, ``audit_every``
    and ``timeout_seconds`` are those of `pulse_rl.integrations.vllm.connect`.

    Raises InputError, EngineError, EngineUnavailable, and ConcurrentUse while another handle drives the server.
    """
    keys = None if trusted_keys is None else list(trusted_keys)
    info = InitInfo(store, stream, base, keys, stream_id, allow_recreated, cache, follow, audit_every)
    return EngineHandle._on(Server(url, timeout_seconds), info, in_flight, timeout_seconds)
