"""Rollout records: what was generated, and by which weights, so that it can be generated again
(docs/replay.md).

One JSON object a line. Any engine's output can carry it; `EngineHandle.generate` and
`pulse_rollout` write it.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .._util.files import disk_error, open_regular
from ..errors import InputError

__all__ = ["Rollout", "Weights"]

SCHEMA = 1
_HEX = frozenset("0123456789abcdef")
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one part of a generation: the ``version`` of its stream, and its ``root``.
    ``start`` is the index of the first token that they generated; None, if the engine has not said
    from which token on."""

    version: int
    root: str
    start: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One generation. ``stream``: the stream's name. ``weights``: which ones generated it, in their
    order: the first are those at its start, the last those at its end; one entry where no sync came
    between.

    ``engine`` and ``engine_version``: such as "vllm" and "0.32.0". ``sampling``: the parameters in
    the engine's terms, what it has not been given left out. ``seed``: that of the request, None
    without one. ``prompt_sha256``: of the prompt's token ids as little-endian uint32;
    ``prompt_token_ids``: these, None where they are kept elsewhere. ``token_ids``: what was
    generated. ``logprobs``: one for each token, as the engine computed it (None: not a number).
    ``metadata``: anything else, by name. Raises InputError where this is no record.
    """

    stream: str
    weights: tuple[Weights, ...]
    engine: str
    engine_version: str
    sampling: Mapping[str, Any]
    seed: int | None
    prompt_sha256: str
    prompt_token_ids: tuple[int, ...] | None
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            wrong = _wrong_in(self)
        except (TypeError, AttributeError) as error:  # what should be a list is none
            wrong = str(error)
        if wrong:
            raise InputError(f"this is no rollout: {wrong}", hint="docs/replay.md has the schema.")

    @classmethod
    def of(cls, prompt: Sequence[int], **facts: Any) -> Rollout:
        """With the digest of ``prompt``, the token ids, which it keeps; ``facts`` are the other
        fields."""
        return cls(prompt_sha256=prompt_digest(prompt), prompt_token_ids=tuple(prompt), **facts)

    def to_json(self) -> str:
        """The record, as one line without its end. Raises InputError for what JSON does not
        have."""
        facts = {name: getattr(self, name) for name in self.__slots__}
        facts["weights"] = [
            {"version": w.version, "root": w.root, "start": w.start} for w in self.weights
        ]
        facts |= {"sampling": dict(self.sampling), "metadata": dict(self.metadata)}
        try:
            return json.dumps({"rollout": SCHEMA} | facts, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"sampling or metadata of a rollout cannot be written as JSON: {error}"
            ) from None

    @classmethod
    def from_json(cls, line: str | bytes) -> Rollout:
        """What `to_json` has written in ``line``. Raises InputError."""
        try:
            found = json.loads(line)
            if found.pop("rollout") != SCHEMA:
                raise ValueError("it has another schema")
            found["weights"] = tuple(Weights(**each) for each in found["weights"])
            for name in ("prompt_token_ids", "token_ids", "logprobs"):
                found[name] = None if found[name] is None else tuple(found[name])
            return cls(**found)
        except InputError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(
                f"this is no rollout: {error}", hint="docs/replay.md has the schema."
            ) from None

    def append(self, path: str | Path) -> None:
        """Adds the record to the file ``path``, as one line. Raises InputError, StoreFull and
        StoreError."""
        append(path, [self])

    @classmethod
    def read(cls, path: str | Path) -> Iterator[Rollout]:
        """The records in the file ``path``, in its order. Raises InputError with the line's number.
        A last line without an end, of a writer that was killed, is left out."""
        try:
            with open_regular(Path(path)) as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    try:
                        yield cls.from_json(line)
                    except InputError as error:
                        if line.endswith(b"\n"):
                            raise InputError(
                                f"line {number} of {path}: {error}", hint=error.hint
                            ) from None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None


def append(path: str | Path, rollouts: Iterable[Rollout]) -> None:
    """Adds all of them by one write, so that several processes may share a file."""
    data = "".join(f"{rollout.to_json()}\n" for rollout in rollouts).encode()
    try:
        with Path(path).open("ab", buffering=0) as file:
            file.write(data)
    except OSError as error:
        raise disk_error(error, f"write {path}") from error


def new_seed() -> int:
    """One that every reader of JSON keeps exact."""
    return secrets.randbits(48)


def prompt_digest(prompt: Sequence[int]) -> str:
    return sha256(np.asarray(prompt, "<u4").tobytes()).hexdigest()


def plain(logprob: float) -> float | None:
    """A logprob as records have it, and as engines answer over HTTP: nothing below -9999, and no
    NaN."""
    return None if math.isnan(logprob) else max(float(logprob), -9999.0)


def _wrong_in(rollout: Rollout) -> str:
    """What of it is not as it should be; empty, if nothing is."""
    starts = [weights.start for weights in rollout.weights]
    known = [start for start in starts if start is not None]
    checks = {
        "stream": isinstance(rollout.stream, str) and rollout.stream,
        "engine": isinstance(rollout.engine, str) and isinstance(rollout.engine_version, str),
        "weights": starts
        and starts[0] == 0
        and all(_is_natural(w.version) and _is_digest(w.root) for w in rollout.weights),
        "weights' starts": all(map(_is_natural, known)) and all(a < b for a, b in pairwise(known)),
        "sampling": isinstance(rollout.sampling, Mapping),
        "seed": rollout.seed is None
        or (isinstance(rollout.seed, int) and not isinstance(rollout.seed, bool)),
        "prompt_sha256": _is_digest(rollout.prompt_sha256),
        "token_ids": all(map(_is_natural, rollout.token_ids)),
        "logprobs": len(rollout.logprobs) == len(rollout.token_ids)
        and all(
            x is None or (isinstance(x, float | int) and math.isfinite(x)) for x in rollout.logprobs
        ),
        "metadata": isinstance(rollout.metadata, Mapping),
    }
    if rollout.prompt_token_ids is not None:
        ids = rollout.prompt_token_ids
        checks["prompt_token_ids"] = (
            all(map(_is_natural, ids)) and prompt_digest(ids) == rollout.prompt_sha256
        )
    wrong = next((name for name, holds in checks.items() if not holds), None)
    return "" if wrong is None else f"{wrong} is {getattr(rollout, wrong, starts)!r}"[:_SHOWN]


def _is_natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= _HEX
