"""Publishing from a sharded trainer without a gather: FSDP2, HSDP, tensor, pipeline and expert parallelism."""

from __future__ import annotations

from .publisher import ShardedPublisher

__all__ = ["ShardedPublisher"]
