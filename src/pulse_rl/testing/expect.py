"""Assertions for the conformance tests: a failure names the broken guarantee."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from hashlib import sha256


class Guarantee(StrEnum):
    """The guarantee that a failed test reports as broken: from docs/protocol.md, section 2, or a call's description."""

    CREATE = "`put_new` is atomic: of any number of creates of one name, exactly one succeeds, and the others fail"
    WHOLE = "`put` shows an object whole or not at all"
    VISIBLE = "`get`, `head` and `list` see every object whose writing call has returned"
    ORDER = "`list` returns names in ascending order"
    CALLS = "each call does what its description in pulse_rl.Store says"


@contextmanager
def checks(guarantee: Guarantee) -> Iterator[None]:
    """Names the guarantee in every failure inside; decorates a test, or surrounds a part of one."""
    place = "" if guarantee is Guarantee.CALLS else " (docs/protocol.md, section 2)"
    try:
        yield
    except AssertionError as error:
        error.args = (f"broken: {guarantee}{place}. Seen: {error}",)
        raise
    except Exception as error:
        error.add_note(f"This was a test of: {guarantee}{place}.")
        raise


def holds(held: bool, seen: str) -> None:
    if not held:
        raise AssertionError(seen)


def equal(found: object, expected: object, what: str) -> None:
    holds(found == expected, f"{what}: {_short(found)}, expected {_short(expected)}")


def same_bytes(found: object, expected: bytes, what: str) -> None:
    holds(isinstance(found, bytes), f"{what}: a {type(found).__name__}, expected bytes")
    equal(found, expected, what)


def raises(expected: type[Exception], what: str, call: Callable[..., object], *arguments: object) -> Exception:
    """The error of the call, which has to be one of ``expected``."""
    try:
        result = call(*arguments)
    except expected as error:
        return error
    except Exception as error:
        named = f"{type(error).__name__} ({str(error)[:200]})"
        raise AssertionError(f"{what}: raised {named}, expected {expected.__name__}") from error
    raise AssertionError(f"{what}: returned {_short(result)}, expected {expected.__name__}")


def _short(value: object) -> str:
    if isinstance(value, bytes) and len(value) > 100:
        return f"{len(value)} bytes with the SHA-256 {sha256(value).hexdigest()[:8]}…"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:150]} … {text[-40:]}"
