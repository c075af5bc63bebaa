"""How whoever drives a vLLM engine gets a handle on it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..engines.handle import EngineHandle, InFlight
from ..engines.transport import InitInfo
from .transport import transport_to


def connect(
    engine: Any,
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
    """A handle on a live engine that was started with the weight-transfer backend ``pulse``.

    ``engine``: a ``vllm.LLM``, an ``AsyncLLM`` (from another thread than its event loop's), or the URL of a server.
    ``store`` (an address), ``stream``, ``trusted_keys``, ``stream_id``, ``allow_recreated`` and ``cache`` are those of
    `pulse_rl.Subscriber`, and are used on the engine's machine. ``base``: the checkpoint that the engine was started
    from, where its own path does not say so. ``follow``: whether the engine fetches and verifies new versions while it
    generates, without being asked. ``in_flight``: what becomes of requests that a sync meets: they are kept, and go on
    with the new weights from the start of their prompt; aborted; or waited for. ``audit_every``: updates from one audit
    to the next; the first update is always audited. ``timeout_seconds``: for each wait.

    Raises InputError, EngineError, EngineUnavailable, and ConcurrentUse while another handle drives the engine.
    """
    transport = transport_to(engine, timeout_seconds)
    keys = None if trusted_keys is None else list(trusted_keys)
    info = InitInfo(store, stream, base, keys, stream_id, allow_recreated, cache, follow, audit_every)
    return EngineHandle._on(transport, info, in_flight, timeout_seconds)
