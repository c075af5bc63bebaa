"""What no optimizer trains and the forward pass reads: frozen parameters and buffers (docs/loco.md,
section 4.1). They are compared as bits; they must be equal on all trainers, and must not change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256

import torch

from .._util.threads import ordered_map
from ..errors import StateMismatch, UnsupportedTensor
from ..state.tensors import State
from .group import TrainerGroup

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20
_ODD = 0x1E3779B97F4A7C15
_DIGEST_BYTES = 32
_MAX_PROBLEM_BYTES = 2000
_UNCHANGED = (
    "Pass all optimizers that train the model, in a list; keep modules with running statistics "
    "in eval()."
)
Model = torch.nn.Module | Mapping[str, torch.Tensor]


class FrozenTensors:
    """The frozen parameters and the buffers of a model: all that `Parameters` has not, without what
    shares its memory.

    **Frozen** is a parameter that no optimizer trains, whether it requires gradients or not. A
    tensor of either kind must be the same on all trainers when they meet, and must stay as it was
    then.

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
        self.specs = [_spec(name, tensor) for name, tensor in self._tensors().items()]
        self._fingerprints: dict[str, object] = {}

    def __bool__(self) -> bool:
        return bool(self.specs)

    def digest(self) -> str:
        """SHA-256 of the SHA-256s of all tensors, 64 hexadecimal digits; from now on
        `require_unchanged` compares with what they are now. Raises StateMismatch as that does for
        buffers that are gone or of another shape."""
        return sha256(b"".join(self._note())).hexdigest()

    def require_unchanged(self) -> None:
        """Raises StateMismatch, with the names, if a tensor has changed since the trainers met."""
        if problem := self._problem():
            raise StateMismatch(problem, hint=_UNCHANGED)

    def meet(self, group: TrainerGroup) -> None:
        """Compares the tensors with those of the other trainers, who all call it. Raises
        StateMismatch, with the first name that differs, on all alike, and TrainerLost."""
        own = self._note()
        if not self or group.size == 1:
            return
        by_rank = group.all_gather_fixed(b"".join(own))
        for number, (name, _, _) in enumerate(self.specs):
            at = _DIGEST_BYTES * number
            found = [digests[at : at + _DIGEST_BYTES] for digests in by_rank]
            others = [rank for rank, digest in enumerate(found) if digest != found[0]]
            if others:
                raise StateMismatch(
                    f"{name!r}, which no optimizer of PulseLoCo trains, is not trainer 0's on "
                    f"trainers {others}",
                    hint="Start from the same model on all trainers.",
                )

    def require_unchanged_on_all(self, group: TrainerGroup) -> int:
        """As `require_unchanged`, on all trainers alike. Returns the bytes of this trainer's
        message, none where nothing has changed. Raises TrainerLost too."""
        if not self:
            return 0
        problem = self._problem().encode()[:_MAX_PROBLEM_BYTES]
        for rank, words in enumerate(group.all_gather(problem, max_bytes=_MAX_PROBLEM_BYTES)):
            if words:
                raise StateMismatch(
                    f"trainer {rank}: {words.decode(errors='replace')}", hint=_UNCHANGED
                )
        return len(problem)

    def _note(self) -> list[bytes]:
        """The SHA-256 of each tensor, in the order of ``specs``; they must not change from now
        on."""
        tensors = self._tensors()
        if problem := self._replaced(tensors):
            raise StateMismatch(problem, hint="Create a new PulseLoCo on all trainers.")
        self._fingerprints = self._fingerprints_of(tensors)
        return list(ordered_map(digest_of, list(tensors.values()), self.threads))

    def _problem(self) -> str:
        """Words for what has changed since the trainers met, "" if nothing has."""
        tensors = self._tensors()
        if problem := self._replaced(tensors):
            return problem
        now = self._fingerprints_of(tensors)
        changed = [name for name in now if now[name] != self._fingerprints[name]]
        if not changed:
            return ""
        return f"{', '.join(map(repr, changed))} changed, and no optimizer of PulseLoCo trains it"

    def _replaced(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Words for the first buffer that is gone, or of another dtype or shape, "" without one."""
        for name, dtype, shape in self.specs:
            if name not in tensors:
                return f"buffer {name!r}, {dtype} {list(shape)}, is gone"
            _, now, size = _spec(name, tensors[name])
            if (now, size) != (dtype, shape):
                return f"buffer {name!r}, {dtype} {list(shape)}, is now {now} {list(size)}"
        return ""

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The tensors as they are now: a module may have replaced some of its buffers."""
        now = _buffers(self._model)
        return {**self._frozen, **{name: now[name] for name in self._buffer_names if name in now}}

    def _fingerprints_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
        found = ordered_map(fingerprint, list(tensors.values()), self.threads)
        return dict(zip(tensors, found, strict=True))


def _spec(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    return name, str(tensor.dtype), tuple(tensor.shape)


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


# -- tensors as bits


def require_dense(tensor: torch.Tensor, what: str) -> None:
    """Raises UnsupportedTensor, with the words ``what``, for a tensor without dense memory that can
    be written: meta, sparse, sharded, quantized, uninitialized, wrapped, of a dtype without a plain
    bit view, or expanded."""
    try:
        State.of({what: tensor})
    except (UnsupportedTensor, ValueError) as error:  # a ValueError of torch: not initialized
        raise UnsupportedTensor(f"trainers cannot keep {what} equal: {error}") from None
    if any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise UnsupportedTensor(
            f"trainers cannot keep {what} equal: its elements share memory",
            hint="Give the tensor memory of its own: clone() an expanded one.",
        )


def digest_of(tensor: torch.Tensor) -> bytes:
    """SHA-256 of the tensor's bytes."""
    return sha256(_bytes(tensor).cpu().numpy().data).digest()


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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes where they are, 1-D uint8; a copy if they do not lie in order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """`_PIECE` odd numbers at random, INT64."""
    generator = torch.Generator("cpu").manual_seed(1)
    drawn = torch.randint(-(1 << 62), 1 << 62, (_PIECE,), generator=generator, device="cpu")
    return (2 * drawn + 1).to(device)
