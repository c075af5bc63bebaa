"""Lossless sparse weight sync for RL post-training: a trainer publishes, workers follow, every sync is verified.

Trainer: ``Publisher(store, stream="policy").publish(model.state_dict())``.
Worker: ``update = Subscriber(store, stream="policy").sync()``, then `pulse_rl.integrations.torch.apply_`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    AlreadyExists,
    ChainGap,
    CorruptCheckpoint,
    CorruptManifest,
    CorruptMessage,
    CorruptPatch,
    DigestMismatch,
    Diverged,
    EmptyStream,
    FormatError,
    InputError,
    IntegrityError,
    InvalidName,
    LocoError,
    NonFinite,
    NotFound,
    PublisherConflict,
    PulseError,
    StateMismatch,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StreamError,
    SubscriberPoisoned,
    TrainerLost,
    UnsupportedTensor,
    Untrusted,
    WrongBase,
)
from .events import Event, PathFailed, Progress, Published, Resumed, Synced
from .maintenance.audit import AuditReport, audit
from .maintenance.verify import verify_stream
from .state.checkpoint import Source, as_state
from .state.digest import state_digest
from .state.rounding import round_to_bf16
from .state.tensors import Bits, State
from .store import LocalStore, MemoryStore, ObjectStore, Store, open_store
from .stream.manifest import Manifest
from .stream.signing import Signer
from .sync.group import Member
from .sync.publisher import Publisher
from .sync.subscriber import Subscriber
from .sync.update import TensorUpdate, Update

if TYPE_CHECKING:
    from .loco import PulseLoCo as PulseLoCo
    from .study.meter import SparsityMeter as SparsityMeter

__version__ = "0.1.0"

__all__ = [
    "AlreadyExists",
    "AuditReport",
    "Bits",
    "ChainGap",
    "CorruptCheckpoint",
    "CorruptManifest",
    "CorruptMessage",
    "CorruptPatch",
    "DigestMismatch",
    "Diverged",
    "EmptyStream",
    "Event",
    "FormatError",
    "InputError",
    "IntegrityError",
    "InvalidName",
    "LocalStore",
    "LocoError",
    "Manifest",
    "Member",
    "MemoryStore",
    "NonFinite",
    "NotFound",
    "ObjectStore",
    "PathFailed",
    "Progress",
    "Published",
    "Publisher",
    "PublisherConflict",
    "PulseError",
    "Resumed",
    "Signer",
    "Source",
    "State",
    "StateMismatch",
    "Store",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "StreamError",
    "Subscriber",
    "SubscriberPoisoned",
    "Synced",
    "TensorUpdate",
    "TrainerLost",
    "UnsupportedTensor",
    "Untrusted",
    "Update",
    "WrongBase",
    "__version__",
    "as_state",
    "audit",
    "open_store",
    "round_to_bf16",
    "state_root",
    "verify_stream",
]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for."""
    if name == "PulseLoCo":
        from .loco import PulseLoCo

        return PulseLoCo
    if name == "SparsityMeter":
        from .study.meter import SparsityMeter

        return SparsityMeter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def state_root(source: Source, *, threads: int | None = None) -> str:
    """The root of any state: a mapping of names to tensors, a `State` or a checkpoint's path; 64 hexadecimal digits."""
    return state_digest(as_state(source), threads=threads).root
