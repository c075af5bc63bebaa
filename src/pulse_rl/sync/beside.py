"""Several streams of one state: each is published as it would be alone, from one pass over the
weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from .._util.threads import ordered_map
from ..errors import InputError
from ..events import Listener, Published, failures_to
from ..state.quantise import check_quantise
from ..state.read_once import ReadOnce
from ..stream.names import StreamNames
from .quantised_shards import quantised
from .rank import RankPublisher
from .request import BASELINE, LocalState, PublishRequest
from .submissions import Submission


class Done(NamedTuple):
    """What a version cost; whether the request's memory was ``kept`` as its baseline; why a stream
    beside it has ``failed``."""

    published: Published
    kept: bool
    failed: BaseException | None = None

    def result(self) -> Published:
        """What the version cost. Raises the error of a stream beside it."""
        if self.failed:
            raise self.failed
        return self.published


def check_beside(
    stream: str, beside: Any, after: int | None = None, on_device: str | None = None
) -> None:
    """Raises InputError unless ``beside`` maps names of streams, others than ``stream``, to what
    ``quantise`` may be, None included; and for arguments of `Publisher.publish` that have no
    meaning for several streams."""
    if not isinstance(beside, Mapping) or stream in beside:
        raise InputError(
            f"beside must map the names of other streams to formats, not {beside!r}",
            hint='Write it like beside={"policy-fp8": "fp8_block"}.',
        )
    for name, quantise in beside.items():
        StreamNames(name)
        if quantise is not None:
            check_quantise(quantise)
    if after is not None:
        raise InputError(
            "after= is of one stream, and the streams beside it have numbers of their own",
            hint="Publish to one stream at a time where a number matters.",
        )
    if on_device == BASELINE:
        raise InputError(
            "on_device='baseline' compares one stream on the device, and those beside it need "
            "all weights on the host",
            hint="Leave it out, or use on_device='copy'.",
        )


def publish_beside(
    own: RankPublisher,
    other: Callable[[str], RankPublisher],
    request: PublishRequest,
    *,
    listener: Listener | None,
    threads: int | None,
    number: int = 0,
    submission: Submission | None = None,
    progress: bool = False,
    **given: Any,
) -> Done:
    """Publishes the state of ``request`` to its own stream and to those beside it, of which
    ``other`` opens each, whether or not one of them fails. Raises the own stream's error; one of
    the others is in the result.

    What is wrong with the state, or with how a stream is quantised, is raised before anything is
    published.
    """
    streams = [("", own)]
    parts: list[LocalState] = []
    once: list[ReadOnce] = []

    def prepare() -> None:
        local = request.arrived()
        formats = [request.quantise, *request.beside.values()]
        if own.together or local.boxes:
            parts.extend(
                local._replace(quantise=quantise, beside=None, owned=False) for quantise in formats
            )
            for part in parts:
                _ = part.state if part.quantise is None else quantised(part)
        else:
            once.append(ReadOnce(local.source, len(formats), threads))
            dtype = local.dtype.name if local.dtype else None
            parts.extend(
                LocalState.of(once[0].of(k), dtype, quantise) for k, quantise in enumerate(formats)
            )
        streams.extend((name, other(name)) for name in request.beside)

    def publish(k: int) -> Published | BaseException:
        try:
            name, rank = streams[k]
            part = replace(request, local=parts[k], copy=None)
            if k == 0:
                return rank.publish(part, number=number, progress=progress, **given)[0]
            with failures_to(listener, name, "publish"):
                return rank.publish(part, number=number, **given)[0]
        except (
            BaseException
        ) as error:  # of whatever kind: it is raised once the other streams have ended
            return error
        finally:
            for reads in once:
                reads.leave(k)

    def in_other_threads() -> Iterator[int]:
        yield from range(1, len(parts))
        # Here, while they work: a listener may ask the publisher whose event it gets.
        made.append(publish(0))

    own.prepare(request, prepare, number=number, submission=submission)
    made: list[Published | BaseException] = []
    if once:
        once[0].begin()
        made += list(ordered_map(publish, in_other_threads(), len(parts)))
    else:  # ranks talk to each other in one order, and all go through all streams
        made += map(publish, range(len(parts)))
    there = {each.stream: each for each in made if isinstance(each, Published)}
    failed = [error for error in made if isinstance(error, BaseException)]
    for error in failed:
        if there:
            versions = ", ".join(
                f"version {each.version} of {name!r}" for name, each in there.items()
            )
            error.add_note(f"Committed of the same state: {versions}.")
    if not isinstance(made[0], Published):
        raise made[0]
    del there[made[0].stream]
    return Done(replace(made[0], beside=there), False, failed[0] if failed else None)
