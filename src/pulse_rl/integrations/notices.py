"""What a publisher's events say in a trainer's log."""

from __future__ import annotations

import logging

from ..events import BaselineRestored, Event, FallbackUsed, Hint, Listener


def logged(log: logging.Logger, listener: Listener | None) -> Listener:
    """A listener that logs notices as warnings and hands every event on to ``listener``."""

    def hear(event: Event) -> None:
        if isinstance(event, Hint):
            log.warning("stream %s: %s. %s", event.stream, event.reason, event.hint)
        elif isinstance(event, FallbackUsed | BaselineRestored):
            log.info("%s", event)
        if listener:
            listener(event)

    return hear
