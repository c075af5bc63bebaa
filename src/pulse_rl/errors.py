"""The exceptions of pulse_rl, one tree.

::

    PulseError
    ├── ConcurrentUse           two threads use one object
    ├── InputError              the caller's input is unusable
    │   ├── UnsupportedTensor   a dtype or layout without a plain bit view
    │   └── StateMismatch       names, dtypes or shapes differ from what is required
    ├── FormatError             malformed bytes
    │   ├── CorruptPatch
    │   ├── CorruptManifest
    │   ├── CorruptCheckpoint   a safetensors file (including an anchor's shard)
    │   └── CorruptMessage      another trainer's message in a round
    ├── IntegrityError          well-formed, but does not match a digest
    │   ├── WrongBase           a patch for another state
    │   │   └── WrongHistory    a patch for a state with another past
    │   ├── DigestMismatch
    │   └── Untrusted           a manifest that no trusted key has signed
    ├── StoreError
    │   ├── NotFound
    │   ├── AlreadyExists       create-if-absent of an existing object
    │   ├── StoreUnavailable    unreachable, or still failing after retries
    │   └── StoreFull
    ├── StreamError
    │   ├── EmptyStream         no version has been committed yet
    │   ├── ChainGap            no path of stored objects leads to the version
    │   ├── PublisherConflict   another publisher committed to the stream
    │   ├── RankLost            a rank of a sharded trainer died or stalled; no version was lost
    │   └── StreamRecreated     the stream was deleted and recreated
    │       └── StreamForked    the stream's store went back in time, and has another history
    ├── EngineError             a live engine refused a call, or is not what it should be
    │   └── EngineUnavailable   the engine does not answer
    ├── TrainerLost             a trainer died, stalled or left; the round had no effect
    ├── Diverged                the trainers hold other global weights
    └── NonFinite               a pseudo-gradient with NaN or Inf

Every instance has a ``kind``, a stable string for programs, and a ``hint``, one sentence on what to
do. ``retryable`` says whether the same call may succeed later although its caller changes nothing:
a store comes back, a missing object is restored, a version is published. ``pulse follow`` waits for
that, and ends at all other errors.
"""

from __future__ import annotations

from typing import ClassVar


class PulseError(Exception):
    """Base class of all errors that this library raises on purpose.

    ``kind`` is stable across releases. ``str(error)`` says what happened, ``hint`` what to do about
    it (a traceback shows both), ``retryable`` whether waiting may be enough.
    """

    kind: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    default_hint: ClassVar[str] = "See the message; if it is unclear, please report it."

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(_visible(message))
        self.hint = _visible(hint if hint is not None else self.default_hint)
        self.add_note(f"Hint: {self.hint}")


def _visible(text: str) -> str:
    """``text`` without control characters, which a terminal would obey: names of others and answers
    of engines are in messages."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


class ConcurrentUse(PulseError, RuntimeError):
    kind = "concurrent_use"
    default_hint = "Give each thread an object of its own, or call it from one thread at a time."


class InputError(PulseError, ValueError):
    kind = "input"
    default_hint = "Check the arguments of the call."


class UnsupportedTensor(InputError):
    kind = "unsupported_tensor"
    default_hint = (
        "Pass dense CPU or device tensors with whole-byte dtypes; gather sharded tensors first."
    )


class StateMismatch(InputError):
    kind = "state_mismatch"
    default_hint = "Both states must have the same tensor names, dtypes and shapes."


class FormatError(PulseError):
    kind = "format"
    default_hint = "The data is damaged or was not written by pulse-rl; fetch or create it again."


class CorruptPatch(FormatError):
    kind = "corrupt_patch"
    default_hint = "Fetch the patch again; if the error persists, restore from an anchor."


class CorruptManifest(FormatError):
    kind = "corrupt_manifest"
    default_hint = "Run `pulse verify` on the stream to see which versions are still reachable."


class CorruptCheckpoint(FormatError):
    kind = "corrupt_checkpoint"
    default_hint = "The file is damaged or incomplete; copy or write it again."


class CorruptMessage(FormatError):
    kind = "corrupt_message"
    default_hint = (
        "All trainers must run the same version of pulse_rl; if they do, restart the round."
    )


class IntegrityError(PulseError):
    kind = "integrity"
    default_hint = (
        "No unverified data was exposed; sync again, or run `pulse verify` on the stream."
    )


class WrongBase(IntegrityError):
    kind = "wrong_base"
    default_hint = (
        "Apply the patch to the state whose root is the patch's base root (`pulse "
        "inspect` shows it)."
    )


class WrongHistory(WrongBase):
    kind = "wrong_history"
    default_hint = (
        "Follow the stream with a Subscriber or `pulse follow`: they remember what "
        "the next patch needs."
    )


class DigestMismatch(IntegrityError):
    kind = "digest_mismatch"


class Untrusted(IntegrityError):
    kind = "untrusted"
    default_hint = "Check the trusted keys; if they are right, someone else wrote to the stream."


class StoreError(PulseError):
    kind = "store"
    default_hint = "Check the store's address, credentials and network."


class NotFound(StoreError):
    kind = "not_found"
    retryable = True
    default_hint = (
        "Check the stream's name (`pulse list STORE`), and that the object was not deleted."
    )


class AlreadyExists(StoreError):
    kind = "already_exists"
    default_hint = "Objects are immutable: choose another name, or read the existing object."


class StoreUnavailable(StoreError):
    kind = "store_unavailable"
    retryable = True
    default_hint = "Nothing was lost; retry when the store is reachable."


class StoreFull(StoreError):
    kind = "store_full"
    retryable = True
    default_hint = "Nothing was lost; free some space and retry."


class StreamError(PulseError):
    kind = "stream"


class EmptyStream(StreamError):
    kind = "empty_stream"
    retryable = True
    default_hint = (
        "Publish a first version, or check the stream's name: `pulse list STORE` "
        "shows what is there."
    )


class ChainGap(StreamError):
    kind = "chain_gap"
    retryable = True
    default_hint = (
        "Publish a new version with an anchor, or restore the missing object in the store."
    )


class PublisherConflict(StreamError):
    kind = "publisher_conflict"
    default_hint = (
        "One stream has one publisher: stop one of them, then create a new Publisher to continue."
    )


class RankLost(StreamError):
    kind = "rank_lost"
    default_hint = (
        "Start all ranks again: the stream is whole, and the next publish goes on "
        "from its newest version."
    )


class StreamRecreated(StreamError):
    kind = "stream_recreated"
    default_hint = (
        "If that is right, create a new Subscriber, or set allow_recreated = True; the state is "
        "unchanged."
    )


class StreamForked(StreamRecreated):
    kind = "stream_forked"
    default_hint = (
        "If a backup was restored, create a new Subscriber, or set allow_recreated = True; the "
        "state is unchanged."
    )


class EngineError(PulseError):
    kind = "engine"
    default_hint = "See the engine's log; it goes on with the weights that it has."


class EngineUnavailable(EngineError):
    kind = "engine_unavailable"
    retryable = True
    default_hint = "Check the address, and that the server is up."


class TrainerLost(PulseError):
    kind = "trainer_lost"
    default_hint = (
        "Reinitialize torch.distributed with the remaining trainers, then call "
        "rejoin() (docs/loco.md, 5)."
    )


class Diverged(PulseError):
    kind = "diverged"
    default_hint = (
        "Restart all from a common checkpoint, or call rejoin() on all after loading "
        "one; do not publish this state."
    )


class NonFinite(PulseError):
    kind = "non_finite"
    default_hint = (
        "Call rewind() to go back to the last common round, or restore a checkpoint; "
        "then lower the learning rate."
    )


def kind_of(error: Exception) -> str:
    """The kind of an error; errors of other libraries have the kind of `PulseError`."""
    return error.kind if isinstance(error, PulseError) else PulseError.kind


def kinds_of(error: type[PulseError]) -> set[str]:
    """The kind of an error, and those of its subclasses."""
    return {error.kind}.union(*(kinds_of(kind) for kind in error.__subclasses__()))
