"""What no optimizer trains and the forward pass reads: frozen parameters and buffers (docs/loco.md, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from .._util.threads import ordered_map
from ..errors import CorruptMessage, Diverged, NonFinite, StateMismatch
from .bits import bits_of, digest_of, fingerprint, mean, require_dense, tensor_of, write_bits
from .exchange import Exchange
from .untrained_message import UntrainedMessage

Model = torch.nn.Module | Mapping[str, torch.Tensor]
_DIGEST_BYTES = 32
_NEW = "Create a new PulseLoCo on all trainers."
_TRAINED = (
    "Pass all optimizers that train the model, in a list; rejoin() on all trainers makes frozen parameters equal."
)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the trainers made of their untrained tensors; ``commit`` takes it up and cannot fail."""

    payload_bytes: int
    commit: Callable[[], None]


class Untrained:
    """The frozen parameters and the buffers of a model: all that `Parameters` has not, without what shares its memory.

    **Frozen** is a parameter that no optimizer trains, whether it requires gradients or not. Trainers take the
    leader's when they meet; one that changes afterwards must change to the same bits on all of them.
    **Buffers** change from step to step. Trainers take the leader's when they meet. After a round each buffer of a
    floating-point dtype is the mean of theirs, and each other one is that of rank 0. ``common`` holds them as they
    were after the last round, on the host.

    Raises UnsupportedTensor for what has no dense memory that can be read and written.
    """

    def __init__(self, model: Model, trained: Mapping[str, torch.Tensor], threads: int | None) -> None:
        self._model, self._threads = model, threads
        known = _Memory(trained.values())
        parameters = dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else dict(model)
        self._frozen = {name: p for name, p in sorted(parameters.items()) if known.lacks(p, f"parameter {name!r}")}
        self._buffer_names = [name for name, b in _buffers(model).items() if known.lacks(b, f"buffer {name!r}")]
        self.specs = [(name, str(t.dtype), tuple(t.shape)) for name, t in {**self._frozen, **self._buffers()}.items()]
        self._buffer_specs = {spec[0]: spec for spec in self.specs if spec[0] in set(self._buffer_names)}
        self._fingerprints: dict[str, object] = {}
        self.common: dict[str, torch.Tensor] | None = None
        self._common_digest = b""
        self.read_common()

    def __bool__(self) -> bool:
        return bool(self.specs)

    def read_common(self) -> None:
        """The buffers as they are now become the common ones: before the first meeting, or of a loaded model."""
        self._set_common({name: bits_of(b) for name, b in self._buffers().items()})

    def require(self) -> None:
        """Raises StateMismatch if the model's buffers are others than when this was made."""
        if problem := self._problem():
            raise StateMismatch(problem, hint=_NEW)

    def restore(self) -> None:
        """Gives the model the common buffers."""
        if self.common is not None:
            for name, buffer in self._buffers().items():
                write_bits(buffer, self.common[name])

    # -- meeting

    def meet(self, exchange: Exchange, leader: int) -> Callable[[], None]:
        """Fetches what differs from the leader's. All trainers must call it; the result takes it up, and cannot fail.

        Raises StateMismatch and TrainerLost.
        """
        self.require()
        if self.common is None:
            self.read_common()
        common = self.common or {}
        if not self or exchange.size == 1:
            return lambda: self._note_frozen(self._frozen)
        own = {**self._digests_of(self._frozen), **{name: digest_of(b) for name, b in common.items()}}
        by_rank = exchange.all_gather_fixed(b"".join(own.values()))
        fetched: dict[str, torch.Tensor] = {}
        for i, name in enumerate(own):
            place = slice(_DIGEST_BYTES * i, _DIGEST_BYTES * (i + 1))
            if any(digests[place] != by_rank[leader][place] for digests in by_rank):
                bits = common[name].clone() if name in common else bits_of(self._frozen[name])
                exchange.broadcast(bits.numpy(), leader)
                if by_rank[exchange.rank][place] != by_rank[leader][place]:
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

    def agree(self, exchange: Exchange, number: int) -> Agreed:
        """Exchanges what has changed since the last round. Nothing changes yet.

        Raises, on all trainers alike: Diverged for frozen parameters that differ, StateMismatch for buffers that have
        become others, NonFinite for a mean that is not finite, CorruptMessage; and TrainerLost.
        """
        if not self:
            return Agreed(0, lambda: None)
        own = self._message()
        data = own.to_bytes()
        problem: CorruptMessage | None = None
        messages: list[UntrainedMessage] = []
        try:
            found = exchange.all_gather(data, max_bytes=self._max_message_bytes())
            messages = [UntrainedMessage.parse(m, self._lengths()) for m in found]
        except CorruptMessage as error:
            problem = error
        decoded = exchange.all_gather_fixed(b"\0" if problem else b"\1")
        if failed := [rank for rank, flag in enumerate(decoded) if flag != b"\1"]:
            cause = problem or "their own errors say why"
            raise CorruptMessage(f"trainers {failed} could not read a message about buffers: {cause}") from problem
        for rank, message in enumerate(messages):
            if message.problem:
                raise StateMismatch(f"trainer {rank}: {message.problem}", hint=_NEW)
        self._require_same_frozen(messages, number)
        if len({message.common for message in messages}) > 1:
            raise Diverged(f"round {number}: the trainers disagree on the buffers after the round before")
        updated = self._means(messages)

        def commit() -> None:
            self._note_frozen({name: self._frozen[name] for name in own.frozen})
            self._set_common((self.common or {}) | updated)
            self.restore()

        return Agreed(len(data), commit)

    def _message(self) -> UntrainedMessage:
        """What this trainer has to say."""
        common = self.common or {}
        if problem := self._problem():
            return UntrainedMessage(self._common_digest.hex(), {}, {}, problem)
        bits = {name: bits_of(buffer) for name, buffer in self._buffers().items()}
        changed = {name: b.numpy().tobytes() for name, b in bits.items() if not torch.equal(b, common[name])}
        now = self._fingerprints_of(self._frozen)
        touched = {name: p for name, p in self._frozen.items() if now[name] != self._fingerprints[name]}
        digests = {name: digest.hex() for name, digest in self._digests_of(touched).items()}
        return UntrainedMessage(self._common_digest.hex(), digests, changed, "")

    def _problem(self) -> str:
        """Words for buffers that are not those of the construction, "" if they are."""
        now = {name: (name, str(b.dtype), tuple(b.shape)) for name, b in _buffers(self._model).items()}
        for name, spec in self._buffer_specs.items():
            if now.get(name) != spec:
                became = f"is now {now[name][1]} {list(now[name][2])}" if name in now else "is gone"
                return f"buffer {name!r}, {spec[1]} {list(spec[2])}, {became}"
        return ""

    def _require_same_frozen(self, messages: list[UntrainedMessage], number: int) -> None:
        for name in sorted({name for message in messages for name in message.frozen}):
            by_rank = [message.frozen.get(name) for message in messages]
            if len(set(by_rank)) > 1:
                ranks = [rank for rank, digest in enumerate(by_rank) if digest is not None]
                raise Diverged(
                    f"round {number}: parameter {name!r}, which no optimizer of PulseLoCo trains, has changed on "
                    f"trainers {ranks} and is no longer the same on all",
                    hint=_TRAINED,
                )

    def _means(self, messages: list[UntrainedMessage]) -> dict[str, torch.Tensor]:
        """The new common bits of every buffer that changed anywhere."""
        common, found = self.common or {}, {}
        for name in sorted({name for message in messages for name in message.buffers}):
            _, dtype, _ = self._buffer_specs[name]
            bits = [
                torch.from_numpy(np.frombuffer(m.buffers[name], np.uint8).copy()) if name in m.buffers else common[name]
                for m in messages
            ]
            values = [tensor_of(b, dtype) for b in bits]
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
            name: tensor_of(bits.clone(), self._buffer_specs[name][1]).reshape(self._buffer_specs[name][2])
            for name, bits in common.items()
        }

    def loaded(self, saved: object) -> dict[str, torch.Tensor]:
        """The bits of saved common buffers. Raises StateMismatch unless they are those of this model."""
        if not isinstance(saved, Mapping) or not all(isinstance(t, torch.Tensor) for t in saved.values()):
            raise StateMismatch("the saved buffers are not a mapping of names to tensors")
        if saved.keys() != self._buffer_specs.keys():
            different = sorted(map(str, saved.keys() ^ self._buffer_specs.keys()))[:3]
            raise StateMismatch(f"the saved buffers are others than the model's: {different}")
        for name, tensor in saved.items():
            if (name, str(tensor.dtype), tuple(tensor.shape)) != self._buffer_specs[name]:
                raise StateMismatch(f"the saved buffer {name!r} is {tensor.dtype} {list(tensor.shape)}")
        return {name: bits_of(saved[name]) for name in self._buffer_specs}

    def load(self, bits: dict[str, torch.Tensor] | None) -> None:
        """Takes up what `loaded` made; None, of a state without buffers: those of the model, when trainers meet."""
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
        digests = ordered_map(digest_of, list(tensors.values()), self._threads)
        return dict(zip(tensors, digests, strict=True))

    def _fingerprints_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
        found = ordered_map(fingerprint, list(tensors.values()), self._threads)
        return dict(zip(tensors, found, strict=True))

    def _lengths(self) -> tuple[frozenset[str], dict[str, int]]:
        """The names of the frozen parameters, and the bytes of each buffer."""
        return frozenset(self._frozen), {name: len(bits) for name, bits in (self.common or {}).items()}

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
        """Whether no part of the tensor is in it; adds it. Raises UnsupportedTensor for what has no memory."""
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
    length = 1 + sum(int(stride * (size - 1)) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    first = int(tensor.storage_offset()) * tensor.element_size()
    return (str(tensor.device), tensor.untyped_storage().data_ptr()), (first, first + length * tensor.element_size())


def _buffers(model: Model) -> dict[str, torch.Tensor]:
    """The buffers of a module, also those that a checkpoint leaves out, in name order. A mapping has none."""
    return dict(sorted(model.named_buffers())) if isinstance(model, torch.nn.Module) else {}
