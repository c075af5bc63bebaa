"""Proofs that the engine computes with what the stream says, and the writes of whole states that
they need.

Through the map: the live parameters are read back and hashed. Not through the map: weights that
mean nothing are written to the live model as an update would be, and loaded by another model of the
same class as its first checkpoint would be. Then all parameters must have the same bits, and each
module the same outputs. What reads a copy of its own, or weights in another place, is as far off as
can be. The live bits are restored.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .._util.threads import ordered_map
from ..errors import PulseError, StateMismatch, UnsupportedTensor
from ..frameworks.torch import _INTS, dtype_of
from ..state.bits import UIntArray
from ..state.digest import LEAF_BYTES, StateDigest, leaf_digests
from ..state.tensors import State, TensorSpec
from .live import Journal, LiveWeights, LoaderMap, Rectangle, as_ints
from .node import Node

_WINDOW_BYTES = 64 * LEAF_BYTES
_TASK_BYTES = 4 * LEAF_BYTES
_PERIOD = 100_003
_SPREAD = 0.05
# Of the largest output of a module: what kernels may differ by from one call to the next.
_NOISE = 2.0**-8
# Where a container's limit of memory is. What it has used counts its cache of files, so that less
# seems free.
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_layer)\.weight$")
_TABLE = re.compile(r"(^|[._])(embed|wte|word_embeddings)[a-z_]*\.weight$|embeddings\.weight$")
_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
# What a model takes in addition to its weights: one weight twice while it is processed, code,
# outputs.
_SLACK = 1 << 28


def differing(
    node: Node, live: LiveWeights, loader_map: LoaderMap, digest: StateDigest | None
) -> list[str]:
    """The checkpoint tensors whose live elements are not those of the version with ``digest``, on
    any worker.

    Each worker puts its elements into a window that all share; where several hold an element, all
    must agree. The leader, which alone needs ``digest``, hashes the window. Tensors that the model
    does not hold are passed over. Collective.
    """
    specs = node.shared(digest.specs if digest else ())
    held = {name for names in node.on_node(list(loader_map.boxes)) for name in names}
    window = node.window(_WINDOW_BYTES)
    wrong: set[str] = set()
    failure: Exception | None = None
    for spec, start, stop in _pieces(specs, held):
        width = spec.dtype.width
        raw = window[: (stop - start) * width]
        here = torch.from_numpy(raw).view(_INTS[width])
        parts = [
            part for box in loader_map.boxes.get(spec.name, ()) for part in box.within(start, stop)
        ]
        try:
            for part in parts:
                _in_window(here, part, start).copy_(live.view(part))
        except Exception as error:  # raised below, when the other workers do not wait any more
            failure = failure or error
        node.barrier()
        try:
            shared = node.size > 1 or len(parts) > 1
            pairs = ((_in_window(here, part, start), live.view(part).cpu()) for part in parts)
            if shared and not all(torch.equal(there, own) for there, own in pairs):
                wrong.add(spec.name)
            if any(part.widened and live.view(part.low_half).any() for part in parts):
                wrong.add(spec.name)
            if digest is not None and node.leader:
                first = start * width // LEAF_BYTES
                tasks = [raw[at : at + _TASK_BYTES] for at in range(0, len(raw), _TASK_BYTES)]
                found = b"".join(ordered_map(leaf_digests, tasks))
                if found != digest.leaves[spec.name][32 * first :][: len(found)]:
                    wrong.add(spec.name)
        except Exception as error:
            failure = failure or error
        node.barrier()
    raise_first(node, failure)
    return node.union(wrong)


def require_whole(
    specs: tuple[TensorSpec, ...], workers: Sequence[Mapping[str, tuple[Rectangle, ...]]]
) -> None:
    """Raises UnsupportedTensor where the ``workers`` of a node, given by their boxes, hold a part
    of a tensor only: no digest of it could be computed there."""
    for spec in specs:
        boxes = [box for boxes in workers for box in boxes.get(spec.name, ())]
        parts = {(box.source, box.sizes, box.source_strides): box.elements for box in boxes}
        if parts and sum(parts.values()) < spec.elements:
            raise UnsupportedTensor(
                f"the workers of this node hold only a part of {spec.name!r}",
                hint="Keep tensor parallelism within a node; pipeline stages and replicas may be "
                "on several.",
            )


def tied_heads(
    specs: tuple[TensorSpec, ...], loader_map: LoaderMap, unused: Collection[str]
) -> list[tuple[str, str]]:
    """The pairs of stream tensors for which a generating engine has one place: two that its loader
    writes there; and a head that no worker takes, with the embedding of the same form that the
    engine uses as its head."""
    heads = [spec for spec in specs if spec.name in unused and _HEAD.search(spec.name)]
    tables = [spec for spec in specs if spec.name not in unused and _TABLE.search(spec.name)]
    return [
        *loader_map.ties,
        *(
            (head.name, table.name)
            for head in heads
            for table in tables
            if (head.dtype, head.shape) == (table.dtype, table.shape)
        ),
    ]


def require_tied(ties: Iterable[tuple[str, str]], digest: StateDigest | None) -> None:
    """Raises StateMismatch where the version with ``digest`` has other values under the two names
    of one of ``ties``."""
    for head, table in ties:
        if digest is not None and digest.leaves[head] != digest.leaves[table]:
            raise StateMismatch(
                f"the stream's {head!r} differs from {table!r}, and the engine uses one tensor for "
                "both: it was started from a tied checkpoint",
                hint="The trainer has untied the model. Start the engine from a folder of "
                "`pulse follow`, or from a checkpoint that the trainer has saved since.",
            )


def require_scales_taken(specs: tuple[TensorSpec, ...], unused: Sequence[Collection[str]]) -> None:
    """Raises UnsupportedTensor for scales that no worker's loader takes, given what each leaves
    ``unused``, though it takes other tensors of the same module: they would be without effect."""
    left = set.intersection(*map(set, unused))
    used = {spec.name for spec in specs} - left
    modules = {name[: at.start()] for name in used for at in re.finditer(r"\.", name)}
    for name in sorted(left):
        is_scale = re.search(r"scale(s|_inv|_2)?$|zero_point$", name)
        if is_scale and name.rpartition(".")[0] in modules:
            raise UnsupportedTensor(
                f"the engine does not take the stream's {name!r}",
                hint="Scales of keys and values become numbers when an engine loads them, and "
                "cannot follow a stream.",
            )


def write_all(node: Node, journal: Journal, loader_map: LoaderMap, state: State | None) -> None:
    """Writes the leader's ``state`` into the live parameters, where they differ. Collective."""
    broadcast(node, loader_map.boxes, state, journal.write)


def broadcast(
    node: Node,
    boxes: Mapping[str, tuple[Rectangle, ...]],
    state: State | None,
    write: Callable[[Rectangle, torch.Tensor], None],
) -> None:
    """Calls ``write`` on each worker for all parts of its ``boxes``, by the checkpoint tensor's
    name, with their bits in the leader's ``state`` as integers. Collective."""
    specs = node.shared(state.specs if state is not None else ())
    held = {name for names in node.on_node(list(boxes)) for name in names}
    window = node.window(_WINDOW_BYTES) if node.size > 1 else None
    failure: Exception | None = None
    for spec, start, stop in _pieces(specs, held):
        width = spec.dtype.width
        if window is None:
            assert state is not None
            here = as_ints(state.read(spec.name, start, stop))
        else:
            if state is not None:
                window[: (stop - start) * width] = state.read(spec.name, start, stop).view(np.uint8)
            node.barrier()
            here = torch.from_numpy(window[: (stop - start) * width]).view(_INTS[width])
        try:
            for box in boxes.get(spec.name, ()):
                for part in box.within(start, stop):
                    write(part, _in_window(here, part, start))
        except Exception as error:  # raised below, when the other workers do not wait any more
            failure = failure or error
        node.barrier()
    raise_first(node, failure)


def load_all(
    node: Node,
    journal: Journal,
    model: torch.nn.Module,
    reloading: Callable[[], AbstractContextManager[None]],
    state: State | None,
) -> None:
    """Lets the model load the leader's ``state`` as it would load a checkpoint, within
    ``reloading``, which does what the engine does around that. For live weights that are not those
    of a known checkpoint. Collective."""
    named = node.shared([(name, state.spec(name)) for name in state] if state is not None else [])
    node.together(journal.keep_all)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in named:
            window = node.window(max(1, spec.nbytes))
            if state is not None:
                window[: spec.nbytes] = state.read(name).view(np.uint8)
            node.barrier()
            tensor = torch.from_numpy(window[: spec.nbytes]).view(dtype_of(spec))
            yield name, tensor.reshape(spec.shape)
            node.barrier()

    supply, failure = tensors(), None
    with reloading():
        try:
            model.load_weights(supply)  # type: ignore[operator]
        except Exception as error:  # raised below, when the other workers do not wait any more
            failure = error
        finally:
            for _ in supply:
                pass
    raise_first(node, failure)


def _pieces(specs: tuple[TensorSpec, ...], held: set[str]) -> Iterator[tuple[TensorSpec, int, int]]:
    for spec in specs:
        if spec.name in held:
            step = _WINDOW_BYTES // spec.dtype.width
            for start in range(0, spec.elements, step):
                yield spec, start, min(start + step, spec.elements)


def _in_window(window: torch.Tensor, part: Rectangle, start: int) -> torch.Tensor:
    return window.as_strided(part.sizes, part.source_strides, part.source - start)


def raise_first(node: Node, failure: Exception | None) -> None:
    """Raises on all workers if one has a ``failure``."""

    def check() -> None:
        if failure is not None:
            reason = f"{type(failure).__name__}: {failure}"
            raise PulseError(f"a worker failed to reach its live parameters: {reason}") from failure

    node.together(check)


@dataclass(frozen=True, slots=True)
class Fresh:
    """How an engine makes another model: ``make`` loads the named tensors into one and processes it
    as the engine's first load did; ``run`` lets a model compute something on fixed tokens, and
    returns its last outputs."""

    make: Callable[[Iterator[tuple[str, torch.Tensor]]], nn.Module]
    run: Callable[[nn.Module], torch.Tensor | None]


def shortage(weights: Iterable[torch.Tensor], workers: int) -> str | None:
    """Which memory does not clearly suffice for another model of as many bytes as ``weights``, for
    the old bits of the live one, and for derived parameters; None where all does. ``workers``: so
    many of this host do it at once."""
    sizes = {
        tensor.untyped_storage().data_ptr(): (tensor.device, tensor.untyped_storage().nbytes())
        for tensor in weights
    }
    old_bits = 2 * workers * sum(size for _, size in sizes.values())
    needed: dict[torch.device, int] = {torch.device("cpu"): old_bits}
    for device, size in sizes.values():
        needed[device] = needed.get(device, 0) + size * (workers if device.type == "cpu" else 1)
    for device, size in needed.items():
        wanted = size + size // 4 + _SLACK * (workers if device.type == "cpu" else 1)
        free = _free_bytes(device)
        if free is None or free < wanted:
            there = "an unknown amount is" if free is None else f"{free >> 20} MiB are"
            return f"{wanted >> 20} MiB of {device} are needed, {there} free"
    return None


def _free_bytes(device: torch.device) -> int | None:
    """What can be allocated on ``device`` now, None if that is not known."""
    if device.type != "cpu":
        ask = getattr(torch.get_device_module(device), "mem_get_info", None)
        return int(ask(device)[0]) if ask is not None else None
    found = []
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    for folder, limit, used in _CGROUPS:
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            found.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
    return min(found, default=None)


def trial_state(specs: tuple[TensorSpec, ...], aliases: dict[str, str]) -> State:
    """A state with the tensors ``specs``, whose floating-point values are noise, the same in all
    processes; others are 0. It takes next to no memory."""
    return State(specs, {spec.name: _Noise(spec) for spec in specs}, aliases)


def as_tensors(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of ``state``, under all of their names."""
    for name in state.names:
        spec = state.spec(name)
        yield name, as_ints(state.read(name)).view(dtype_of(spec)).reshape(spec.shape)


class _Noise:
    """The elements of one tensor: values that repeat."""

    def __init__(self, spec: TensorSpec) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
        dtype, size = dtype_of(spec), min(_PERIOD, max(1, spec.elements))
        if dtype.is_floating_point:
            values = (torch.randn(size, generator=generator) * _SPREAD).to(dtype)
        else:
            values = torch.zeros(size, dtype=dtype)
        self._tile: UIntArray = values.view(_INTS[spec.dtype.width]).numpy().view(spec.dtype.uint)

    def read(self, start: int, stop: int) -> UIntArray:
        found: UIntArray = self._tile[np.arange(start, stop, dtype=np.int64) % len(self._tile)]
        return found


def unlike(
    live: nn.Module,
    other: nn.Module,
    run: Callable[[nn.Module], torch.Tensor | None],
    weights: Mapping[str, torch.Tensor],
) -> tuple[list[str], str | None]:
    """The modules of ``live`` whose parameters or outputs are not those of ``other``; and why
    outputs could not be compared, None if they were. ``weights``: which elements of parameters, by
    name, are no padding. Collective."""
    # 1. The bits of all parameters.
    wrong, expected = [], dict(other.named_parameters()) | persistent_buffers(other)
    for name, tensor in (dict(live.named_parameters()) | persistent_buffers(live)).items():
        found = expected.get(name)
        same = found is not None and (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        if same:
            ints = _INTS[tensor.element_size()]
            apart = tensor.detach().view(ints) != found.detach().view(ints)  # type: ignore[union-attr]
            same = not bool((apart & weights[name] if name in weights else apart).any())
        if not same:
            wrong.append(name.rpartition(".")[0])
    # 2. The outputs of all modules that run. Those of the live model twice: what differs from one
    # call to the next is no proof.
    try:
        first, again, others = (_outputs(model, run) for model in (live, live, other))
    except Exception as error:  # a model's own: it may need what only the engine's steps have
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return sorted(set(wrong)), reason
    for name, outputs in first.items():
        steady = _apart(outputs, again.get(name, [])) == 0
        if steady and _apart(outputs, others.get(name, [])) > _NOISE:
            wrong.append(name)
    # 3. The innermost modules only: what contains them differs as well.
    innermost = {
        name
        for name in wrong
        if not any(other.startswith(f"{name}.") for other in wrong) or not name
    }
    return sorted(innermost), None


def padded(loader_map: LoaderMap, model: nn.Module) -> dict[str, torch.Tensor]:
    """Which elements of a parameter are weights, where a loader fills others with a constant."""
    masks: dict[str, torch.Tensor] = {}
    for name, tensor in model.named_parameters():
        if loader_map.padding.get(name) and not tensor.storage_offset():
            masks[name] = torch.empty_like(tensor, dtype=torch.bool).fill_(False)
    for box in (box for boxes in loader_map.boxes.values() for box in boxes):
        if box.parameter in masks:
            step = 2 if box.widened else 1  # the box counts in halves of an element
            strides = [stride // step for stride in box.target_strides]
            masks[box.parameter].as_strided(box.sizes, strides, box.target // step).fill_(True)
    return masks


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The floating-point buffers that belong to the model's state."""
    state = model.state_dict().keys()
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in state and buffer.is_floating_point() and buffer.numel()
    }


def _outputs(
    model: nn.Module, run: Callable[[nn.Module], torch.Tensor | None]
) -> dict[str, list[torch.Tensor]]:
    """What each module gives, by its name, and ``run`` in the end. Each module that has weights
    gets noise in place of its floating-point arguments, the same noise for the same name, so that a
    difference stays where it arises."""
    outputs: dict[str, list[torch.Tensor]] = {}
    calls: Counter[str] = Counter()

    def noisy(name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        calls[name] += 1
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {calls[name]}".encode()))

        def noise(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
            return value

        return tuple(map(noise, args)), {key: noise(value) for key, value in kwargs.items()}

    def note(name: str, _: nn.Module, args: Any, output: Any) -> None:
        flat = output if isinstance(output, (tuple, list)) else [output]
        tensors = [value.detach().float().cpu() for value in flat if torch.is_tensor(value)]
        outputs.setdefault(name, []).extend(tensors)

    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            if name and any(True for _ in module.parameters()):
                before, after = partial(noisy, name), partial(note, name)
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after))
        last = run(model)
    if last is not None:
        outputs[""] = [last.float().cpu()]
    return outputs


def _apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest difference in parts of the largest value."""
    if [tensor.shape for tensor in one] != [tensor.shape for tensor in other]:
        return float("inf")
    worst = 0.0
    for first, second in zip(one, other, strict=True):
        if first.numel() and not torch.equal(first, second):
            apart = (first - second).abs().max() / first.abs().max().clamp_min(1e-30)
            worst = max(worst, float(apart.nan_to_num(float("inf"))))
    return worst
