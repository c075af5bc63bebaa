"""What no optimizer trains and the forward pass reads: frozen parameters and buffers (docs/loco.md,
section 4.1).

They are compared and sent as bits; `FrozenAndBuffers` is one trainer's side of it, `BuffersMessage`
what it says."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any, Self

import numpy as np
import torch

from .._util.threads import ordered_map
from ..errors import CorruptMessage, Diverged, NonFinite, StateMismatch, UnsupportedTensor
from ..state.tensors import State
from .group import TrainerGroup

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20
_ODD = 0x1E3779B97F4A7C15
MAGIC = b"PLSU"
_HEADER = struct.Struct("<4sI")
_FIELDS: dict[str, type] = {"common": str, "frozen": dict, "buffers": list, "problem": str}
Model = torch.nn.Module | Mapping[str, torch.Tensor]
_DIGEST_BYTES = 32
_NEW = "Create a new PulseLoCo on all trainers."
_TRAINED = (
    "Pass all optimizers that train the model, in a list; rejoin() on all trainers makes "
    "frozen parameters equal."
)


@dataclass(frozen=True, slots=True)
class BuffersMessage:
    """``common``: the digest of the common buffers. ``frozen``: the digests of the frozen
    parameters that have changed since the trainers agreed on them (both hexadecimal). ``buffers``:
    the bits of those that are not the common ones. ``problem``: why the trainer cannot go on, or
    "".
    """

    common: str
    frozen: Mapping[str, str]
    buffers: Mapping[str, bytes]
    problem: str

    def to_bytes(self) -> bytes:
        fields = {
            "common": self.common,
            "frozen": dict(self.frozen),
            "buffers": list(self.buffers),
            "problem": self.problem[:500],
        }
        head = json.dumps(fields).encode()
        return b"".join([_HEADER.pack(MAGIC, len(head)), head, *self.buffers.values()])

    @classmethod
    def parse(cls, data: bytes, lengths: tuple[frozenset[str], Mapping[str, int]]) -> Self:
        """``lengths``: the names of the frozen parameters, and the bytes of each buffer. Raises
        CorruptMessage."""
        frozen, sizes = lengths
        magic, length = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (b"", 0)
        if magic != MAGIC or _HEADER.size + length > len(data):
            raise CorruptMessage("not a message about buffers and frozen parameters")
        try:
            fields: Any = json.loads(data[_HEADER.size : _HEADER.size + length])
        except ValueError as error:
            raise CorruptMessage(f"a message about buffers is not JSON: {error}") from None
        if not isinstance(fields, dict) or any(
            not isinstance(fields.get(k), t) for k, t in _FIELDS.items()
        ):
            raise CorruptMessage(f"a message about buffers lacks one of {', '.join(_FIELDS)}")
        names, at = fields["buffers"], _HEADER.size + length
        known = all(isinstance(name, str) and name in sizes for name in names) and len(
            set(names)
        ) == len(names)
        digests = all(
            name in frozen and isinstance(digest, str) for name, digest in fields["frozen"].items()
        )
        if not (known and digests) or at + sum(sizes[name] for name in names) != len(data):
            raise CorruptMessage("a message about buffers does not fit the model")
        buffers = {}
        for name in names:
            buffers[name] = data[at : at + sizes[name]]
            at += sizes[name]
        return cls(fields["common"], fields["frozen"], buffers, fields["problem"])


@dataclass(frozen=True, slots=True)
class PendingBuffers:
    """What the trainers made of their untrained tensors; ``commit`` takes it up and cannot fail."""

    payload_bytes: int
    commit: Callable[[], None]


class FrozenAndBuffers:
    """The frozen parameters and the buffers of a model: all that `Parameters` has not, without what
    shares its memory.

    **Frozen** is a parameter that no optimizer trains, whether it requires gradients or not.
    Trainers take the leader's when they meet; one that changes afterwards must change to the same
    bits on all of them. **Buffers** change from step to step. Trainers take the leader's when they
    meet. After a round each buffer of a floating-point dtype is the mean of theirs, and each other
    one is that of rank 0. ``common`` holds them as they were after the last round, on the host.

    Raises UnsupportedTensor for what has no dense memory that can be read and written.
    """

    def __init__(self, model: Model, trained: Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self.threads: int | None = None
        known = _Memory(trained.values())
        parameters = (
            dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else dict(model)
        )
        self._frozen = {
            name: p
            for name, p in sorted(parameters.items())
            if known.lacks(p, f"parameter {name!r}")
        }
        self._buffer_names = [
            name for name, b in _buffers(model).items() if known.lacks(b, f"buffer {name!r}")
        ]
        self.specs = [
            (name, str(t.dtype), tuple(t.shape))
            for name, t in {**self._frozen, **self._buffers()}.items()
        ]
        self._buffer_specs = {
            spec[0]: spec for spec in self.specs if spec[0] in set(self._buffer_names)
        }
        self._fingerprints: dict[str, object] = {}
        self.common: dict[str, torch.Tensor] | None = None
        self._common_digest = b""
        self.read_common()

    def __bool__(self) -> bool:
        return bool(self.specs)

    def read_common(self) -> None:
        """The buffers as they are now become the common ones: before the first meeting, or of a
        loaded model."""
        self._set_common({name: bits_of(b) for name, b in self._buffers().items()})

    def require(self) -> None:
        """Raises StateMismatch if the model's buffers are others than when this was made."""
        if problem := self._problem():
            raise StateMismatch(problem, hint=_NEW)

    def digest(self) -> str:
        """SHA-256 of all frozen parameters and the common buffers, 64 hexadecimal digits; from now
        on `require_unchanged` holds them to it."""
        self._note_frozen(self._frozen)
        return sha256(
            b"".join([*self._digests_of(self._frozen).values(), self._common_digest])
        ).hexdigest()

    def require_unchanged(self) -> None:
        """Raises StateMismatch if a frozen parameter or a buffer has changed since the `digest`."""
        own = self._message()
        if own.problem or own.frozen or own.buffers:
            names = ", ".join(map(repr, [*own.frozen, *own.buffers]))
            raise StateMismatch(
                own.problem
                or f"{names} changed, and no optimizer trains it: over a store buffers are not "
                "averaged",
                hint="Freeze it, as in eval(), or give the trainers a process group in place of "
                "the store.",
            )

    def restore(self) -> None:
        """Gives the model the common buffers."""
        if self.common is not None:
            for name, buffer in self._buffers().items():
                write_bits(buffer, self.common[name])

    # -- meeting

    def meet(self, group: TrainerGroup, leader: int) -> Callable[[], None]:
        """Fetches what differs from the leader's. All trainers must call it; the result takes it
        up, and cannot fail.

        Raises StateMismatch and TrainerLost.
        """
        self.require()
        if self.common is None:
            self.read_common()
        common = self.common or {}
        if not self or group.size == 1:
            return lambda: self._note_frozen(self._frozen)
        own = {
            **self._digests_of(self._frozen),
            **{name: digest_of(b) for name, b in common.items()},
        }
        # Digests first: what all have alike does not travel.
        by_rank = group.all_gather_fixed(b"".join(own.values()))
        fetched: dict[str, torch.Tensor] = {}
        for i, name in enumerate(own):
            place = slice(_DIGEST_BYTES * i, _DIGEST_BYTES * (i + 1))
            if any(digests[place] != by_rank[leader][place] for digests in by_rank):
                bits = common[name].clone() if name in common else bits_of(self._frozen[name])
                group.broadcast(bits.numpy(), leader)
                if by_rank[group.rank][place] != by_rank[leader][place]:
                    fetched[name] = bits

        def take_up() -> None:
            for name in fetched.keys() & self._frozen.keys():
                write_bits(self._frozen[name], fetched[name])
            self._note_frozen(self._frozen)
            if others := {name: bits for name, bits in fetched.items() if name in common}:
                self._set_common(common | others)
                self.restore()

        return take_up

    # -- a round

    def agree(self, group: TrainerGroup, number: int) -> PendingBuffers:
        """Exchanges what has changed since the last round. Nothing changes yet.

        Raises, on all trainers alike: Diverged for frozen parameters that differ, StateMismatch for
        buffers that have become others, NonFinite for a mean that is not finite, CorruptMessage;
        and TrainerLost.
        """
        if not self:
            return PendingBuffers(0, lambda: None)
        # 1. What has changed here since the last round: in a steady state nothing, and a message of
        # a few bytes.
        own = self._message()
        data = own.to_bytes()
        problem: CorruptMessage | None = None
        messages: list[BuffersMessage] = []
        try:
            found = group.all_gather(data, max_bytes=self._max_message_bytes())
            messages = [BuffersMessage.parse(m, self._lengths()) for m in found]
        except CorruptMessage as error:
            problem = error
        # 2. A message that one could not read is refused by all.
        if failed := group.failures(problem):
            cause = problem or "their own errors say why"
            raise CorruptMessage(
                f"trainers {failed} could not read a message about buffers: {cause}"
            ) from problem
        # 3. All have the same messages, so all come to the same.
        for rank, message in enumerate(messages):
            if message.problem:
                raise StateMismatch(f"trainer {rank}: {message.problem}", hint=_NEW)
        self._require_same_frozen(messages, number)
        if len({message.common for message in messages}) > 1:
            raise Diverged(
                f"round {number}: the trainers disagree on the buffers after the round before"
            )
        updated = self._means(messages)

        def commit() -> None:
            self._note_frozen({name: self._frozen[name] for name in own.frozen})
            self._set_common((self.common or {}) | updated)
            self.restore()

        return PendingBuffers(len(data), commit)

    def _message(self) -> BuffersMessage:
        """What this trainer has to say."""
        common = self.common or {}
        if problem := self._problem():
            return BuffersMessage(self._common_digest.hex(), {}, {}, problem)
        bits = {name: bits_of(buffer) for name, buffer in self._buffers().items()}
        changed = {
            name: b.numpy().tobytes()
            for name, b in bits.items()
            if not torch.equal(b, common[name])
        }
        now = self._fingerprints_of(self._frozen)
        touched = {
            name: p for name, p in self._frozen.items() if now[name] != self._fingerprints[name]
        }
        digests = {name: digest.hex() for name, digest in self._digests_of(touched).items()}
        return BuffersMessage(self._common_digest.hex(), digests, changed, "")

    def _problem(self) -> str:
        """Words for buffers that are not those of the construction, "" if they are."""
        now = {
            name: (name, str(b.dtype), tuple(b.shape)) for name, b in _buffers(self._model).items()
        }
        for name, spec in self._buffer_specs.items():
            if now.get(name) != spec:
                became = f"is now {now[name][1]} {list(now[name][2])}" if name in now else "is gone"
                return f"buffer {name!r}, {spec[1]} {list(spec[2])}, {became}"
        return ""

    def _require_same_frozen(self, messages: list[BuffersMessage], number: int) -> None:
        for name in sorted({name for message in messages for name in message.frozen}):
            by_rank = [message.frozen.get(name) for message in messages]
            if len(set(by_rank)) > 1:
                ranks = [rank for rank, digest in enumerate(by_rank) if digest is not None]
                raise Diverged(
                    f"round {number}: parameter {name!r}, which no optimizer of PulseLoCo "
                    "trains, has changed on "
                    f"trainers {ranks} and is no longer the same on all",
                    hint=_TRAINED,
                )

    def _means(self, messages: list[BuffersMessage]) -> dict[str, torch.Tensor]:
        """The new common bits of every buffer that changed anywhere."""
        common, found = self.common or {}, {}
        for name in sorted({name for message in messages for name in message.buffers}):
            _, dtype, _ = self._buffer_specs[name]
            bits = [
                torch.from_numpy(np.frombuffer(m.buffers[name], np.uint8).copy())
                if name in m.buffers
                else common[name]
                for m in messages
            ]
            values = [tensor_of(b, dtype) for b in bits]
            # Counters and FP8 have no mean: rank 0's.
            if not values[0].is_floating_point() or values[0].element_size() == 1:
                found[name] = bits[0]
                continue
            result, finite = mean(values)
            if not finite:
                ranks = [rank for rank, v in enumerate(values) if not torch.isfinite(v).all()]
                raise NonFinite(f"buffer {name!r} is not finite on trainers {ranks}")
            found[name] = bits_of(result)
        return found

    # -- state

    def saved(self) -> dict[str, torch.Tensor]:
        """Copies of the common buffers by name, in their dtypes and shapes."""
        common = self.common or {}
        return {
            name: tensor_of(bits.clone(), self._buffer_specs[name][1]).reshape(
                self._buffer_specs[name][2]
            )
            for name, bits in common.items()
        }

    def loaded(self, saved: object) -> dict[str, torch.Tensor]:
        """The bits of saved common buffers. Raises StateMismatch unless they are those of this
        model."""
        if not isinstance(saved, Mapping) or not all(
            isinstance(t, torch.Tensor) for t in saved.values()
        ):
            raise StateMismatch("the saved buffers are not a mapping of names to tensors")
        if saved.keys() != self._buffer_specs.keys():
            different = sorted(map(str, saved.keys() ^ self._buffer_specs.keys()))[:3]
            raise StateMismatch(f"the saved buffers are others than the model's: {different}")
        for name, tensor in saved.items():
            if (name, str(tensor.dtype), tuple(tensor.shape)) != self._buffer_specs[name]:
                raise StateMismatch(
                    f"the saved buffer {name!r} is {tensor.dtype} {list(tensor.shape)}"
                )
        return {name: bits_of(saved[name]) for name in self._buffer_specs}

    def load(self, bits: dict[str, torch.Tensor] | None) -> None:
        """Takes up what `loaded` made; None, of a state without buffers: those of the model, when
        trainers meet."""
        self.common = None
        if bits is not None:
            self._set_common(bits)

    # -- helpers

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers as they are now: a module may have replaced some."""
        now = _buffers(self._model)
        return {name: now[name] for name in self._buffer_names}

    def _set_common(self, bits: dict[str, torch.Tensor]) -> None:
        self.common = bits
        self._common_digest = sha256(b"".join(digest_of(b) for b in bits.values())).digest()

    def _note_frozen(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._fingerprints |= self._fingerprints_of(parameters)

    def _digests_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """SHA-256 of the bits of each tensor, a tensor a thread."""
        digests = ordered_map(digest_of, list(tensors.values()), self.threads)
        return dict(zip(tensors, digests, strict=True))

    def _fingerprints_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
        found = ordered_map(fingerprint, list(tensors.values()), self.threads)
        return dict(zip(tensors, found, strict=True))

    def _lengths(self) -> tuple[frozenset[str], dict[str, int]]:
        """The names of the frozen parameters, and the bytes of each buffer."""
        return frozenset(self._frozen), {
            name: len(bits) for name, bits in (self.common or {}).items()
        }

    def _max_message_bytes(self) -> int:
        names = sum(6 * len(name) + 100 for name, _, _ in self.specs)  # escaped, with a digest
        return 4096 + names + sum(len(bits) for bits in (self.common or {}).values())


class _Memory:
    """The memory of some tensors, and of those that were asked for."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._spans: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for tensor in tensors:
            self._add(tensor)

    def lacks(self, tensor: torch.Tensor, what: str) -> bool:
        """Whether no part of the tensor is in it; adds it. Raises UnsupportedTensor for what has no
        memory."""
        require_dense(tensor, what)
        if not tensor.numel():
            return False
        key, (first, last) = _span(tensor)
        if any(first < stop and start < last for start, stop in self._spans.get(key, [])):
            return False
        self._add(tensor)
        return True

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            key, span = _span(tensor)
            self._spans.setdefault(key, []).append(span)


def _span(tensor: torch.Tensor) -> tuple[tuple[str, int], tuple[int, int]]:
    """(device and storage, first and last byte) of a tensor that is not empty."""
    length = 1 + sum(
        int(stride * (size - 1)) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    first = int(tensor.storage_offset()) * tensor.element_size()
    return (str(tensor.device), tensor.untyped_storage().data_ptr()), (
        first,
        first + length * tensor.element_size(),
    )


def _buffers(model: Model) -> dict[str, torch.Tensor]:
    """The buffers of a module, also those that a checkpoint leaves out, in name order. A mapping
    has none."""
    return dict(sorted(model.named_buffers())) if isinstance(model, torch.nn.Module) else {}


# -- tensors as bits: read, written, compared, averaged; on the host, unless said otherwise


def require_dense(tensor: torch.Tensor, what: str) -> None:
    """Raises UnsupportedTensor, with the words ``what``, for a tensor without dense memory that can
    be written: meta, sparse, sharded, quantized, uninitialised, wrapped, of a dtype without a plain
    bit view, or expanded."""
    try:
        State.of({what: tensor})
    except (UnsupportedTensor, ValueError) as error:  # a ValueError of torch: not initialised
        raise UnsupportedTensor(f"trainers cannot keep {what} equal: {error}") from None
    if any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise UnsupportedTensor(
            f"trainers cannot keep {what} equal: its elements share memory",
            hint="Give the tensor memory of its own: clone() an expanded one.",
        )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor's bytes, 1-D uint8."""
    return _bytes(tensor).to("cpu", copy=True)


def digest_of(tensor: torch.Tensor) -> bytes:
    """SHA-256 of the tensor's bytes."""
    return sha256(_bytes(tensor).cpu().numpy().data).digest()


def tensor_of(bits: torch.Tensor, dtype: str) -> torch.Tensor:
    """The elements that the bytes ``bits`` are, 1-D; ``dtype`` as torch writes it."""
    found = getattr(torch, dtype.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return bits.view(found)


@torch.no_grad()
def write_bits(tensor: torch.Tensor, bits: torch.Tensor) -> None:
    """Gives the tensor, in place and on its device, the bytes that `bits_of` has read."""
    tensor.copy_(bits.view(tensor.dtype).reshape(tensor.shape))


def fingerprint(tensor: torch.Tensor) -> object:
    """What compares unequal in this process for other bits of the tensor, but for a chance of
    2^-60. It is computed on the tensor's device and takes one reading of its memory."""
    return digest_of(tensor) if tensor.device.type == "cpu" else fingerprint_on_device(tensor)


@torch.no_grad()
def fingerprint_on_device(tensor: torch.Tensor) -> int:
    """The elements as integers, multiplied by numbers at random and added up, modulo 2^64."""
    words = _bytes(tensor).view(_INTS[tensor.element_size()])
    weights, found = (
        _weights(tensor.device),
        torch.zeros((), dtype=torch.int64, device=tensor.device),
    )
    for start in range(0, len(words), _PIECE):
        piece = words[start : start + _PIECE]
        found = found * _ODD + (piece * weights[: len(piece)]).sum()
    return int(found)


def mean(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """(mean, whether it is finite) of floating-point tensors of one dtype and shape.

    Elements with the same bits everywhere stay as they are, and may be NaN or infinite. Of others
    the sum in FP64, in this order, is divided by their number and rounded to FP32 (an FP64 mean is
    not), then to the dtype.
    """
    first, dtype = values[0], values[0].dtype
    total, same = (
        torch.zeros_like(first, dtype=torch.float64),
        torch.ones_like(first, dtype=torch.bool),
    )
    for value in values:
        total += value.double()
        same &= value.view(_INTS[value.element_size()]) == first.view(_INTS[first.element_size()])
    result = total / len(values)
    if dtype != torch.float64:
        result = result.float().to(dtype)
    return torch.where(same, first, result), bool((same | result.isfinite()).all())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes where they are, 1-D uint8; a copy if they do not lie in order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """`_PIECE` odd numbers at random, INT64."""
    generator = torch.Generator("cpu").manual_seed(1)
    drawn = torch.randint(-(1 << 62), 1 << 62, (_PIECE,), generator=generator, device="cpu")
    return (2 * drawn + 1).to(device)
