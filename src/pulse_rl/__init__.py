"""Lossless sparse weight sync for RL post-training.

A trainer publishes versions of its weights, workers follow them, and every sync is verified.

Trainer: ``Publisher(store, stream="policy").publish(model.state_dict())``. Worker: ``update =
Subscriber(store, stream="policy").sync()``, then `pulse_rl.frameworks.torch.apply_`.

Errors are in `pulse_rl.errors`, events in `pulse_rl.events`, and the rest of PULSELoCo in
`pulse_rl.loco`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import errors as errors
from . import events as events
from ._util.threads import checked_threads
from .errors import PulseError
from .events import Published
from .follow.checkpoint import unwrapped
from .follow.multi_subscriber import MultiSubscriber
from .ops.checkout import checkout
from .ops.compaction import fold_stream
from .ops.gc import gc_stream
from .ops.relay import Relay
from .ops.verify import audit, verify_stream
from .state.digest import state_digest
from .state.tensors import Bits, State, StateSource
from .store import LocalStore, ObjectInfo, Store, open_store
from .stores.memory import MemoryStore
from .stream.signing import Signer
from .sync.publisher import Publisher
from .sync.subscriber import Subscriber
from .sync.update import Update

if TYPE_CHECKING:
    from .loco import PulseLoCo as PulseLoCo

__version__ = "0.1.0"

__all__ = [
    "Bits",
    "LocalStore",
    "MemoryStore",
    "MultiSubscriber",
    "ObjectInfo",
    "Published",
    "Publisher",
    "PulseError",
    "Relay",
    "Signer",
    "State",
    "Store",
    "Subscriber",
    "Update",
    "as_state",
    "audit",
    "checkout",
    "fold_stream",
    "gc_stream",
    "open_store",
    "state_root",
    "unwrapped",
    "verify_stream",
]


def __getattr__(name: str) -> Any:
    """Import `PulseLoCo` on first use, because it needs torch."""
    if name == "PulseLoCo":
        from .loco import PulseLoCo

        return PulseLoCo
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def as_state(source: StateSource) -> State:
    """Return the state of ``source``, as `State.of` does.

    Args:
        source: A mapping of names to tensors, a checkpoint's path, a torch.nn.Module or a `State`.
    Returns: The state, without a copy.
    Raises: As `State.of`.
    """
    return State.of(source)


def state_root(source: StateSource, *, threads: int | None = None) -> str:
    """Return the root of a state (docs/format.md, section 2).

    Two states have the same root only if their names, dtypes, shapes and bits are equal.

    Args:
        source: The state: a torch.nn.Module, a mapping of names to tensors, a `State`, or a
            checkpoint's path.
        threads: The maximum number of threads. Default: one per core.
    Returns: 64 hexadecimal digits.
    Raises:
        InputError: ``source`` is not a state, or ``threads`` is below 1.
        UnsupportedTensor: A tensor has a dtype or a layout that has no plain bits.
        CorruptCheckpoint: The checkpoint's files are damaged.
    """
    return state_digest(State.of(source), threads=checked_threads(threads)).root
