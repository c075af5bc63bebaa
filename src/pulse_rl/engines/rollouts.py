"""Rollout records: what was generated, and by which weights; and how it is generated again
(docs/replay.md).

One JSON object a line. Any engine's output can carry it; `EngineHandle.generate` and
`pulse_rollout` write it. A replay goes back to the weights of a record, and compares token by
token.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._util.files import disk_error, open_regular
from .._util.settings import short_int
from ..errors import InputError, StateMismatch

if TYPE_CHECKING:
    from .handle import EngineHandle

__all__ = ["Rollout"]

SCHEMA = 1
_HEX = frozenset("0123456789abcdef")
_SHOWN = 80
# Parameters that look at what was generated so far, or may: a request that begins in the middle
# sees none of it.
_OF_THE_OUTPUT = (
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "structured_outputs",
)

# What some route of an engine takes next to sampling parameters: it says what is asked, and of
# which model, which is the record's to say.
_OF_THE_REQUEST = re.compile(
    "model|prompt(_embeds|_token_ids)?|(token|input)_ids|input_embeds|messages|text|suffix|echo"
    "|stream|best_of|truncate_prompt_tokens|lora_path|(sampling_)?seed"
)


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one part of a generation: the ``version`` of its stream, and its ``root``.
    ``start`` is the index of the first token that they generated; None, if the engine has not
    reported it."""

    version: int
    root: str
    start: int | None = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One generation, and the weights that it came from.

    Args:
        stream: The stream's name.
        weights: The weights that generated it, in their order: the first are those at its start,
            the last those at its end. One entry if no sync came between.
        engine: The engine's name, such as "vllm".
        engine_version: The engine's version, such as "0.32.0".
        sampling: The parameters in the engine's terms, without those that it was not given.
        seed: The request's seed, None without one.
        prompt_sha256: The digest of the prompt's token ids as little-endian uint32.
        prompt_token_ids: The prompt's token ids, None if they are kept elsewhere.
        token_ids: The tokens that were generated.
        logprobs: One for each token, as the engine computed it. None: not a number.
        metadata: Anything else, by name.

    Raises:
        InputError: This is no record.
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
        facts["weights"] = [asdict(weights) for weights in self.weights]
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
            found = json.loads(line, parse_int=short_int)
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


@dataclass(frozen=True, slots=True)
class Replay:
    """How a ``rollout`` came out when it was generated again. ``token_ids`` and ``logprobs`` have
    one entry for each of its tokens, None where none was generated. ``differing``: the indices at
    which the token, or any bit of its logprob, is another one. ``reason``: why some could not be
    generated; empty, if all were. ``engine_version``: of the engine that has done it."""

    rollout: Rollout
    token_ids: tuple[int | None, ...]
    logprobs: tuple[float | None, ...]
    differing: tuple[int, ...]
    reason: str
    engine_version: str

    @property
    def same(self) -> bool:
        """Whether all tokens and logprobs are the same, to the last bit."""
        return not self.reason and not self.differing


def replay(handle: EngineHandle, rollout: Rollout) -> Replay:
    """See `EngineHandle.replay`."""
    count = len(rollout.token_ids)
    tokens: list[int | None] = [None] * count
    logprobs: list[float | None] = [None] * count
    differing: list[int] = []
    reason, version = _hindrance(rollout, handle.stream), ""
    ends = [*(weights.start or 0 for weights in rollout.weights[1:]), count]
    for weights, end in zip(rollout.weights, ends, strict=True):
        start = weights.start
        if reason or start is None:
            break
        reason = _hindrance_within(rollout) if start else ""
        if reason or rollout.prompt_token_ids is None:
            break
        # 1. The exact weights: what sync has verified is a version's root, which must be the
        # record's.
        handle.sync(weights.version)
        prompt = rollout.prompt_token_ids + rollout.token_ids[:start]
        sampling = dict(rollout.sampling) | {"max_tokens": end - start}
        if least := sampling.get("min_tokens"):
            sampling["min_tokens"] = max(0, least - start)
        again = handle.generate(prompt, sampling, seed=rollout.seed)
        if [found.root for found in again.weights] != [weights.root]:
            raise StateMismatch(
                f"version {weights.version} of {rollout.stream!r} has the root "
                f"{again.weights[-1].root[:16]}…, not {weights.root[:16]}…",
                hint="The record is of another stream of this name, or the engine was synced "
                "meanwhile.",
            )
        # 2. Token by token: one that is missing differs, and so does one more bit of a logprob.
        version = again.engine_version
        made = list(zip(again.token_ids, again.logprobs, strict=True))[: end - start]
        for index, found in enumerate(made, start):
            tokens[index], logprobs[index] = found
        for index in range(start, end):
            expected = (rollout.token_ids[index], rollout.logprobs[index])
            if (tokens[index], logprobs[index]) != expected:
                differing.append(index)
    return Replay(rollout, tuple(tokens), tuple(logprobs), tuple(differing), reason, version)


def _hindrance(rollout: Rollout, stream: str) -> str:
    """Why nothing of it can be generated again; empty, if something can."""
    if rollout.stream != stream:
        return f"it is of stream {rollout.stream!r}"
    if rollout.prompt_token_ids is None:
        return "the record has no prompt"
    if found := no_sampling(rollout.sampling):
        return f"its sampling has {found!r}, which is no sampling parameter"
    if rollout.sampling.get("n") not in (None, 1):
        return "it is one of several completions"
    if any(weights.start is None for weights in rollout.weights):
        return "the engine has not said which tokens came from which weights"
    if rollout.seed is None and rollout.sampling.get("temperature", 1.0) != 0:
        return "it was sampled without a seed"
    return ""


def no_sampling(sampling: Mapping[str, Any]) -> str:
    """The first name in ``sampling`` that would change what is asked; empty without one."""
    return next(filter(_OF_THE_REQUEST.fullmatch, sorted(map(str, sampling))), "")


def _hindrance_within(rollout: Rollout) -> str:
    """Why a part that begins after a sync cannot be generated by a request of its own."""
    if rollout.sampling.get("temperature", 1.0) != 0:
        return "a sync came between, and the random numbers after it are not those of a new request"
    found = next((name for name in _OF_THE_OUTPUT if rollout.sampling.get(name)), None)
    if found is not None:
        return f"a sync came between, and {found} looks at the tokens before it"
    return ""


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
