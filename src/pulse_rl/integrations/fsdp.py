"""Publishing from a sharded trainer without a gather: FSDP, HSDP, ZeRO-3, tensor, pipeline and
expert parallelism."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Unpack

from .._util import extra

with extra("torch"):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import DTensor

from .._util.collective import GlooTransport, RankGroup
from .._util.settings import checked_number, checked_path
from ..errors import InputError
from ..events import Metadata, Published
from ..state.quantise import Quantise
from ..state.tensors import State
from ..store import Store
from ..sync.checkout import Checkout
from ..sync.layout import Box
from ..sync.publisher import Publisher, PublisherSettings
from ..sync.request import LocalState, require_weights
from ..sync.state_folder import StateFolder
from .dtensor import local_box
from .flat import FlatShard
from .jax import local_part
from .positions import RankSlice
from .weights import policy_weights

__all__ = ["ShardedPublisher"]

_DEFAULT_SECONDS = 600.0


class ShardedPublisher(Publisher):
    """Publishes the states of one policy that is sharded over several ranks, none of which gathers
    it.

    All ranks of ``process_group`` (None: all there are) make one, with the same arguments, and call
    `publish`, or `submit`, in the same order, each with what it has: a ``state_dict`` of DTensors
    (``fully_shard``, with replicas, tensor parallelism over rows or columns) and of plain tensors,
    whole on one rank (pipeline stages, experts) or on several; a dictionary of jax.Arrays; or a
    module, whose parameters FSDP1 or DeepSpeed ZeRO-3 may have cut. Each rank compares, codes,
    hashes and uploads its own slices, and keeps a copy of these alone; then rank 0 commits the
    version, and all return what it cost. Of several ranks with the same slice the lowest publishes
    it. Readers follow the stream as any other, and a `Publisher` or another number of ranks can
    continue it. A stream that begins with a version of another is begun by a `Publisher`: here
    `begin_from` raises InputError.

    With ``quantise``, by a name or a configuration, they agree on the scales of blocks that cross
    them; `submit` copies what is to be quantised. Streams ``beside`` this one are published one
    after another, from that copy.

    ``baseline``: a folder on a disk of each machine, in which each rank has one of its own
    (``rank-0`` …): its slices of the last version are a mapped file there instead of memory. Ranks
    that start again with it, as many as before, go on from there, once all parts together have the
    version's root; a rank that has lost its own reads its slices from the store. The other settings
    are those of `Publisher`, ``threads`` for each rank. No call waits for another rank for longer
    than ``timeout_seconds``.

    Host memory of a rank: its slices once, unless ``baseline`` maps them (twice where a patch would
    be no smaller than they are), the changes of one version, a block (at most 2^22 elements) and
    its code for each thread, and on rank 0 the leaves' digests, 32 bytes for each MiB of the state;
    with ``folds`` about 6 bytes for every BF16 weight of its slices that changed within a span.

    Arguments of a call are the same on all ranks but for the source, and for ``files``, of which
    rank 0's count. An error of one rank is raised on all. A state of which the ranks publish other
    slices than of the version before is published with an anchor and no patch. Calls also raise
    StateMismatch, where the ranks do not have each element once, and RankLost, if a rank dies: then
    nothing was committed or all of it; start the ranks again. A version that one rank cancels, or
    gives up to ``replace`` it, is cancelled on all. An error that nobody has asked a `Submission`
    for is raised by `wait` and `close`, which releases the ranks' group. Making one is a
    collective. Raises InputError and RankLost.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        stream: str,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = _DEFAULT_SECONDS,
        baseline: str | os.PathLike[str] | None = None,
        **settings: Unpack[PublisherSettings],
    ) -> None:
        def checked() -> dict[str, Any]:
            return {
                "timeout_seconds": checked_number("timeout_seconds", timeout_seconds),
                "baseline": "none" if baseline is None else "a folder",
            }

        def folder(beside: str) -> StateFolder | None:
            mine = f"rank-{ranks.rank}"
            return (
                None
                if baseline is None
                else StateFolder(checked_path(baseline) / mine / beside, "baseline")
            )

        # Whatever is wrong on one rank, it comes to where the others can be told.
        try:
            seconds = checked()["timeout_seconds"]
        except InputError:
            seconds = _DEFAULT_SECONDS
        ranks = RankGroup(GlooTransport(process_group, seconds, owner="ShardedPublisher"))
        self._open(ranks, store, stream=stream, also=checked, folder=folder, **settings)

    def begin_from(self, found: Checkout, *, metadata: Metadata | None = None) -> Published:
        # Each rank would hold all of the version, and the next one have other slices: an anchor in
        # place of a patch.
        hint = (
            "Publisher(...).begin_from(found) in one process, or pulse publish STORE#S@N "
            "STORE --stream BRANCH, first."
        )
        raise InputError(
            "ranks do not begin a stream with a version of another, they go on from it", hint=hint
        )

    def _read(self, source: Any, dtype: str | None, quantise: Quantise | None) -> LocalState:
        return local_state(source, dtype)._replace(quantise=quantise)


def local_state(source: Mapping[str, Any] | nn.Module, dtype: str | None) -> LocalState:
    """The elements that this rank has of ``source``, a ``state_dict`` or a module, cast to the
    compute dtype ``dtype``: each shard under its tensor's name, with the shape that it has here.
    Raises InputError and UnsupportedTensor."""
    if isinstance(source, nn.Module):
        source = policy_weights(source, gather=False)
    if not isinstance(source, Mapping):
        raise InputError(
            f"a {type(source).__name__} is not a mapping",
            hint="Pass the model, or model.state_dict().",
        )
    require_weights((n, tuple(v.shape)) for n, v in source.items() if isinstance(v, torch.Tensor))
    shards: dict[str, Any] = {}
    boxes: dict[str, Box] = {}
    for name, value in source.items():
        if isinstance(value, FlatShard | RankSlice):
            shards[name], boxes[name] = value.local, value.box
        elif _is_of_jax(value):
            shards[name], boxes[name] = local_part(name, value)
        elif not isinstance(value, DTensor):
            shards[name] = value
        elif value.device_mesh.get_coordinate() is not None:
            shards[name] = value.to_local()
            if (box := local_box(name, value)) != Box.whole(box.shape):
                boxes[name] = box
    return LocalState.of(State.of(shards), dtype)._replace(boxes=boxes)


def _is_of_jax(value: object) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)
