"""A call that all ranks of a publisher make, with the same arguments."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from itertools import product
from typing import Any

from .._util.collective import RankGroup
from ..errors import InputError, RankLost
from .request import PublishRequest
from .submissions import Submission, begin

_CALL = struct.Struct("<Q?")  # a call's number, and whether this rank goes on with it
_SHOWN = 200


def make_call(
    ranks: RankGroup,
    stream: str,
    request: PublishRequest,
    work: Callable[[], Any],
    number: int,
    submission: Submission | None,
) -> list[Any]:
    """What ``work()`` returns on each rank, as JSON has it, where all make the same call, by its
    ``number``, of ``stream``; nothing without others. Raises RankLost, InputError, and
    CancelledError where one is cancelled."""

    def describe() -> bytes:
        goes = submission is None or begin(submission)
        call = _CALL.pack(number, goes)
        if not goes:
            return call
        found = work()
        if ranks.size == 1:
            return call
        arguments = {
            name: getattr(request, name)
            for name in ("metadata", "dtype", "anchor", "after", "quantise")
        }
        arguments |= {"stream": stream, "beside": [*request.beside.items()]}
        return call + json.dumps([arguments, found]).encode()

    said = ranks.run_on_all(describe)
    calls = [_CALL.unpack_from(message) for message in said]
    for rank, (theirs, _) in enumerate(calls):
        if theirs != calls[0][0]:
            raise RankLost(
                f"the ranks have parted: rank 0 makes its call {calls[0][0]}, rank {rank} its "
                f"call {theirs}",
                hint="One was interrupted before a call that the others made. Start the ranks "
                "again.",
            )
    if not all(goes for _, goes in calls):
        raise ranks.mark_collective(CancelledError())
    if submission:
        submission.set_running_or_notify_cancel()
    if ranks.size == 1:
        return []
    met = [json.loads(message[_CALL.size :]) for message in said]
    _compare(ranks, [arguments for arguments, _ in met])
    return [found for _, found in met]


def _compare(ranks: RankGroup, calls: Sequence[Mapping[str, Any]]) -> None:
    """Raises RankLost where a rank is at another step, and InputError, on all, where one was called
    with other arguments."""
    for (rank, call), what in product(enumerate(calls), ("stream", "metadata")):
        first, other = calls[0][what], call[what]
        if other != first:
            raise RankLost(
                f"the ranks have parted: rank 0 publishes {json.dumps(first)[:_SHOWN]}, rank "
                f"{rank} "
                f"{json.dumps(other)[:_SHOWN]}",
                hint="One has missed a step, or was given other metadata. Start the ranks again.",
            )
    if found := unlike(calls):
        raise ranks.mark_collective(
            InputError(found, hint="Call all ranks with the same arguments.")
        )


def unlike(given: Sequence[Mapping[str, Any]]) -> str:
    """What was not given to all ranks alike, in words; "" if nothing."""
    for name, first in given[0].items():
        for rank, other in enumerate(given):
            if other[name] != first:
                return f"{name} is {first!r} on rank 0, but {other[name]!r} on rank {rank}"
    return ""
