"""Lossless sparse weight sync for RL post-training: a trainer publishes, workers follow, every sync is verified.

Trainer: ``Publisher(store, stream="policy").publish(model.state_dict())``.
Worker: ``update = Subscriber(store, stream="policy").sync()``, then `pulse_rl.integrations.torch.apply_`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    AlreadyExists,
    ChainGap,
    ConcurrentUse,
    CorruptCheckpoint,
    CorruptManifest,
    CorruptMessage,
    CorruptPatch,
    DigestMismatch,
    Diverged,
    EmptyStream,
    EngineError,
    EngineUnavailable,
    FormatError,
    InputError,
    IntegrityError,
    InvalidName,
    LocoError,
    MemberConflict,
    NonFinite,
    NotFound,
    PublisherConflict,
    PulseError,
    RankLost,
    StateMismatch,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StreamError,
    StreamReplaced,
    SubscriberPoisoned,
    TrainerLeft,
    TrainerLost,
    UnsupportedTensor,
    Untrusted,
    WrongBase,
    WrongHistory,
)
from .events import (
    Applied,
    CallFailed,
    DensityDrift,
    Event,
    Folded,
    FoldFailed,
    Listener,
    Metadata,
    Notice,
    PathFailed,
    Progress,
    Published,
    Relayed,
    Resumed,
    Synced,
)
from .maintenance.anchor import anchor_stream
from .maintenance.audit import AuditReport, Module, audit
from .maintenance.fold import fold_stream
from .maintenance.gc import GcPlan, gc_stream
from .maintenance.relay import Relay
from .maintenance.verify import VersionReport, verify_stream
from .state.checkpoint import StateSource, as_state
from .state.digest import StateDigest, state_digest
from .state.rounding import round_to_bf16
from .state.tensors import Bits, DType, State, TensorSpec, UIntArray
from .state.wrappers import unwrapped
from .store import Data, HttpStore, LocalStore, MemoryStore, ObjectInfo, ObjectStore, Store, open_store
from .stream.manifest import AnchorRef, Manifest, PatchRef, Payload, Signature
from .stream.signing import Signer
from .sync.group import Member
from .sync.publisher import Publisher
from .sync.submit import Submission
from .sync.subscriber import Subscriber
from .sync.subscribers import Subscribers
from .sync.update import TensorUpdate, Update

if TYPE_CHECKING:
    from .loco import PulseLoCo as PulseLoCo
    from .loco import Round as Round
    from .study.meter import SparsityMeter as SparsityMeter

__version__ = "0.1.0"

__all__ = [
    "AlreadyExists",
    "AnchorRef",
    "Applied",
    "AuditReport",
    "Bits",
    "CallFailed",
    "ChainGap",
    "ConcurrentUse",
    "CorruptCheckpoint",
    "CorruptManifest",
    "CorruptMessage",
    "CorruptPatch",
    "DType",
    "Data",
    "DensityDrift",
    "DigestMismatch",
    "Diverged",
    "EmptyStream",
    "EngineError",
    "EngineUnavailable",
    "Event",
    "FoldFailed",
    "Folded",
    "FormatError",
    "GcPlan",
    "HttpStore",
    "InputError",
    "IntegrityError",
    "InvalidName",
    "Listener",
    "LocalStore",
    "LocoError",
    "Manifest",
    "Member",
    "MemberConflict",
    "MemoryStore",
    "Metadata",
    "Module",
    "NonFinite",
    "NotFound",
    "Notice",
    "ObjectInfo",
    "ObjectStore",
    "PatchRef",
    "PathFailed",
    "Payload",
    "Progress",
    "Published",
    "Publisher",
    "PublisherConflict",
    "PulseError",
    "RankLost",
    "Relay",
    "Relayed",
    "Resumed",
    "Signature",
    "Signer",
    "State",
    "StateDigest",
    "StateMismatch",
    "StateSource",
    "Store",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "StreamError",
    "StreamReplaced",
    "Submission",
    "Subscriber",
    "SubscriberPoisoned",
    "Subscribers",
    "Synced",
    "TensorSpec",
    "TensorUpdate",
    "TrainerLeft",
    "TrainerLost",
    "UIntArray",
    "UnsupportedTensor",
    "Untrusted",
    "Update",
    "VersionReport",
    "WrongBase",
    "WrongHistory",
    "__version__",
    "anchor_stream",
    "as_state",
    "audit",
    "fold_stream",
    "gc_stream",
    "open_store",
    "round_to_bf16",
    "state_root",
    "unwrapped",
    "verify_stream",
]

_WITH_TORCH = {"PulseLoCo": "loco", "Round": "loco", "SparsityMeter": "study.meter"}


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for."""
    if name in _WITH_TORCH:
        return getattr(import_module(f".{_WITH_TORCH[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_WITH_TORCH])


def state_root(source: StateSource, *, threads: int | None = None) -> str:
    """The root of any state as 64 hexadecimal digits (docs/format.md, section 2).

    ``source``: a mapping of names to tensors, a `State`, or a checkpoint's path. ``threads``: the maximum number (None:
    one per core). Raises InputError, UnsupportedTensor and CorruptCheckpoint.
    """
    return state_digest(as_state(source), threads=threads).root
