"""Lossless sparse weight sync for RL post-training: a trainer publishes, workers follow, every sync is verified.

Trainer: ``Publisher(store, stream="policy").publish(model.state_dict())``.
Worker: ``update = Subscriber(store, stream="policy").sync()``, then `pulse_rl.integrations.torch.apply_`.
"""

from .audit import AuditReport, audit
from .checkpoint import Source, as_state
from .digest import state_digest
from .errors import (
    AlreadyExists,
    ChainGap,
    CorruptCheckpoint,
    CorruptManifest,
    CorruptPatch,
    DigestMismatch,
    EmptyStream,
    FormatError,
    InputError,
    IntegrityError,
    InvalidName,
    NotFound,
    PublisherConflict,
    PulseError,
    StateMismatch,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StreamError,
    SubscriberPoisoned,
    UnsupportedTensor,
    Untrusted,
    WrongBase,
)
from .events import Event, PathFailed, Progress, Published, Resumed, Synced
from .group import Member
from .manifest import Manifest
from .publisher import Publisher
from .signing import Signer
from .store import LocalStore, MemoryStore, ObjectStore, Store, open_store
from .subscriber import Subscriber
from .tensors import Bits, State, round_to_bf16
from .update import TensorUpdate, Update
from .verify import verify_stream

__version__ = "0.1.0"

__all__ = [
    "AlreadyExists",
    "AuditReport",
    "Bits",
    "ChainGap",
    "CorruptCheckpoint",
    "CorruptManifest",
    "CorruptPatch",
    "DigestMismatch",
    "EmptyStream",
    "Event",
    "FormatError",
    "InputError",
    "IntegrityError",
    "InvalidName",
    "LocalStore",
    "Manifest",
    "Member",
    "MemoryStore",
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


def state_root(source: Source, *, threads: int | None = None) -> str:
    """The root of any state: a mapping of names to tensors, a `State` or a checkpoint's path; 64 hexadecimal digits."""
    return state_digest(as_state(source), threads=threads).root
