"""How whoever drives an SGLang server gets a handle on it."""

from __future__ import annotations

from collections.abc import Collection

from ..engines.handle import EngineHandle, InFlight, init_info
from .http import Server


def connect(
    url: str,
    *,
    store: str,
    stream: str,
    base: str | None = None,
    trusted_keys: Collection[str] | None = None,
    identity: str | None = None,
    follow_restarts: bool = False,
    cache: str | None = None,
    follow: bool = True,
    in_flight: InFlight = "keep",
    audit_every: int = 100,
    timeout_seconds: float = 600.0,
) -> EngineHandle:
    """A handle on an SGLang server that was started with ``--custom-weight-loader pulse_rl.integrations.sglang.load``.

    ``url``: the server's. ``store`` (an address), ``stream``, ``trusted_keys``, ``identity``, ``follow_restarts`` and
    ``cache`` are those of `pulse_rl.Subscriber`, and are used on the server's machines. ``base``: the checkpoint that
    the server was started from, where its own path does not say so. ``follow``: whether the server fetches and verifies
    new versions while it generates, without being asked. ``in_flight``: what becomes of requests that a sync meets:
    they are kept, and go on with the new weights from the start of their prompt; aborted; or waited for, in which case
    new ones wait. ``audit_every``: updates from one audit to the next; the first update is always audited.
    ``timeout_seconds``: for each wait.

    Raises InputError, EngineError, EngineUnavailable, and ConcurrentUse while another handle drives the server.
    """
    info = init_info(store, stream, base, trusted_keys, identity, follow_restarts, cache, follow, audit_every)
    return EngineHandle._on(Server(url, timeout_seconds), info, in_flight, timeout_seconds)
