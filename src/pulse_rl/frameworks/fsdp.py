"""Publishing from a sharded trainer without a gather: FSDP, HSDP, ZeRO-3, tensor, pipeline and
expert parallelism."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from typing import Any

from .._util import extra

with extra("torch"):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import DTensor

from .._util.collective import GlooTransport, RankGroup
from .._util.settings import checked_number
from ..errors import InputError
from ..events import Listener, Metadata, Published
from ..ops.checkout import Checkout
from ..quantize.states import Quantize
from ..sharding.layout import SliceSpec
from ..sharding.rank import ShardedRank, unlike
from ..state.cast import DTypeLike
from ..state.tensors import State
from ..store import Store
from ..stream.signing import Signer
from ..sync.publisher import Publisher, PublisherSettings
from ..sync.request import LocalState, require_weights
from .jax import local_part
from .shards import FlatShard, RankSlice, local_box
from .weights import Weights, policy_weights

__all__ = ["ShardedPublisher"]

_DEFAULT_SECONDS = 600.0


class ShardedPublisher(Publisher):
    """Publish the states of one policy that is sharded over several ranks, without a gather.

    All ranks make one, with the same arguments, and call `publish`, or `submit`, in the same order,
    each with what it has: a ``state_dict`` of DTensors (``fully_shard``, with replicas, tensor
    parallelism over rows or columns) and of plain tensors, whole on one rank (pipeline stages,
    experts) or on several; a dictionary of jax.Arrays; or a module, whose parameters FSDP1 or
    DeepSpeed ZeRO-3 may have cut. Each rank compares, codes, hashes and uploads its own slices, and
    keeps a copy of these alone; then rank 0 commits the version, and all return what it cost. Of
    several ranks with the same slice the lowest publishes it. Readers follow the stream as any
    other, and a `Publisher` or another number of ranks can continue it. A stream that begins with a
    version of another is begun by a `Publisher`: here `begin_from` raises InputError.

    Arguments of a call are the same on all ranks but for the source, and for ``files``, of which
    rank 0's count. An error of one rank is raised on all. A state of which the ranks publish other
    slices than of the version before is published with an anchor and no patch. Calls also raise
    StateMismatch, where the ranks do not have each element once, and RankLost, if a rank dies: then
    nothing was committed or all of it; start the ranks again. A version that one rank cancels, or
    gives up to ``replace`` it, is cancelled on all. An error that nobody has asked a `Submission`
    for is raised by `wait` and `close`, which releases the ranks' group. With ``quantize``, by a
    name or a configuration, the ranks agree on the scales of blocks that cross them. Making one is
    a collective.

    Host memory of a rank: its slices once (twice where a patch would be no smaller than they are),
    the changes of one version, a block (at most 2^22 elements) and its code for each thread, and on
    rank 0 the leaves' digests, 32 bytes for each MiB of the state.

    Args:
        store: As for `Publisher`; the same store on all ranks.
        stream: The stream's name.
        process_group: The ranks. None: all there are.
        timeout_seconds: No call waits for another rank for longer.
        anchor_ratio: As for `Publisher`.
        keep: As for `Publisher`.
        signer: As for `Publisher`.
        trusted_keys: As for `Publisher`.
        threads: As for `Publisher`, for each rank.
        on_event: As for `Publisher`.

    Raises:
        InputError: A setting makes no sense, or is not the same on all ranks.
        RankLost: A rank has died.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        stream: str,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = _DEFAULT_SECONDS,
        anchor_ratio: float = 1.0,
        keep: int | None = None,
        signer: Signer | None = None,
        trusted_keys: Collection[str] = (),
        threads: int | None = None,
        on_event: Listener | None = None,
    ) -> None:
        # Whatever is wrong on one rank, it is raised where the others hear of it.
        try:
            seconds = checked_number("timeout_seconds", timeout_seconds)
        except InputError:
            seconds = _DEFAULT_SECONDS
        ranks = RankGroup(GlooTransport(process_group, seconds, owner="ShardedPublisher"))

        def checked() -> PublisherSettings:
            checked_number("timeout_seconds", timeout_seconds)
            settings = PublisherSettings(
                anchor_ratio, keep, signer, trusted_keys, threads, on_event
            )
            self._open(ShardedRank, ranks, store, stream, settings)
            return settings

        try:
            settings = ranks.together(checked)
            shared = settings.shared() | {
                "store": store if isinstance(store, str) else type(store).__name__,
                "stream": stream,
                "timeout_seconds": timeout_seconds,
            }
            said = ranks.each(lambda: shared, lambda of: json.dumps(of).encode(), json.loads)
            if found := unlike([json.loads(json.dumps(of)) for of in said]):
                raise InputError(
                    found, hint="Make the publisher with the same arguments on all ranks."
                )
        except BaseException:
            ranks.close()
            raise

    def begin_from(self, found: Checkout, *, metadata: Metadata | None = None) -> Published:
        # Each rank would hold all of the version, and the next one have other slices: an anchor in
        # place of a patch.
        raise InputError(
            "ranks do not begin a stream with a version of another, they go on from it",
            hint="Publisher(...).begin_from(found) in one process, or pulse publish STORE#S@N "
            "STORE --stream BRANCH, first.",
        )

    def _read(self, source: Any, dtype: DTypeLike | None, quantize: Quantize | None) -> LocalState:
        """The elements that this rank has of ``source``, a ``state_dict`` or a module: each shard
        under its tensor's name, with the shape that it has here."""
        if isinstance(source, nn.Module):
            source = policy_weights(source, gather=False)
        if not isinstance(source, Mapping):
            raise InputError(
                f"a {type(source).__name__} is not a mapping",
                hint="Pass the model, or model.state_dict().",
            )
        require_weights(
            (n, tuple(v.shape)) for n, v in source.items() if isinstance(v, torch.Tensor)
        )
        jax = sys.modules.get("jax")
        shards = Weights()
        shards.uncast = getattr(source, "uncast", shards.uncast)
        boxes: dict[str, SliceSpec] = {}
        for name, value in source.items():
            if isinstance(value, FlatShard | RankSlice):
                shards[name], boxes[name] = value.local, value.box
            elif jax is not None and isinstance(value, jax.Array):
                shards[name], boxes[name] = local_part(name, value)
            elif not isinstance(value, DTensor):
                shards[name] = value
            elif value.device_mesh.get_coordinate() is not None:
                shards[name] = value.to_local()
                if (box := local_box(name, value)) != SliceSpec.whole(box.shape):
                    boxes[name] = box
        local = LocalState.of(State.of(shards), dtype)
        return local._replace(boxes=boxes, quantize=quantize)
