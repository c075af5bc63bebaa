"""The weight-transfer engine ``pulse``, as vLLM's workers know it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.v1.worker.worker_base import WorkerBase

from ...errors import ConcurrentUse, InputError, PulseError
from ..engines.node import Node
from ..engines.session import Learnt, Session, local_checkpoint
from .contract import require_known
from .plain import require_no_derived_weights, require_plain_weights
from .quantised import loaded_forms
from .reload import reloading

require_known(WeightTransferEngine, vllm.__version__)

LEASE_SECONDS = 15.0


@dataclass
class PulseInitInfo(WeightTransferInitInfo):
    """``store``: its address; ``stream``: its name; ``base``: a checkpoint's path (None: the one that the engine was
    started from); ``trusted_keys``, ``identity``, ``follow_restarts`` and ``cache`` as those of `pulse_rl.Subscriber`;
    ``follow``: whether new versions are staged without being asked for; ``audit_every``: updates from one audit to the
    next; ``owner``: any string that stands for who drives the engine."""

    store: str
    stream: str
    base: str | None = None
    trusted_keys: list[str] | None = None
    identity: str | None = None
    follow_restarts: bool = False
    cache: str | None = None
    follow: bool = True
    audit_every: int = 100
    owner: str = ""


@dataclass
class PulseUpdateInfo(WeightTransferUpdateInfo):
    """``version``: which to go to; None: the newest that is staged."""

    version: int | None = None


class PulseWeightTransferEngine(WeightTransferEngine[PulseInitInfo, PulseUpdateInfo]):
    """Follows a stream in the background; between start and finish it scatters what is staged."""

    init_info_cls = PulseInitInfo
    update_info_cls = PulseUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._session: Session | None = None
        self._node: Node | None = None
        self._info: PulseInitInfo | None = None
        self._learnt = Learnt()
        self._heard_of_owner = 0.0
        self._error: PulseError | None = None
        self._opening = False
        self.left_open = False

    # -- vLLM's contract

    def init_transfer_engine(self, init_info: PulseInitInfo) -> None:
        self._noting(lambda: self._open(init_info))

    def start_weight_update(self) -> None:
        self._error = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PulseUpdateInfo) -> None:
        self._noting(lambda: self._opened().update(update_info.version))

    def finish_weight_update(self) -> None:
        """Nothing is left to do: `update_weights` returns when the device has the bits."""

    def shutdown(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = self._info = None

    # -- what a handle asks for

    def pulse(self, action: str, owner: str = "", version: int | None = None) -> dict[str, Any]:
        """One of the actions "hello", "status", "stage", "prepare", "audit" and "close".

        The answer is the status: "failure" is the error of this call, if it has one; "error" that of the last update,
        or of the last look at the store. They are part of the answer because not every transport carries errors.
        """
        actions: dict[str, Callable[[], object]] = {
            "hello": lambda: _raise(self._refused(owner)),
            "status": lambda: None,
            "stage": lambda: self._stage(version),
            "prepare": lambda: self._opened().prepare(),
            "audit": lambda: self._opened().audit(),
            "close": self.shutdown,
        }
        try:
            if action != "hello":
                self._hear(owner)
            result = actions[action]()
        except PulseError as error:
            return self._status() | {"failure": _described(error)}
        return self._status() | ({"differing": result} if action == "audit" else {})

    def _status(self) -> dict[str, Any]:
        session, error = self._session, self._error
        status: dict[str, Any] = {"open": session is not None}
        if session is not None and self._info is not None:
            staging = session.staging
            prepared = staging.prepared
            status |= {
                "store": self._info.store,
                "stream": self._info.stream,
                "leader": staging.subscriber is not None,
                "version": session.live.version,
                "held": staging.subscriber.version if staging.subscriber is not None else None,
                "staged": prepared.staged.version if prepared is not None else None,
                "asked": staging.state.asked,
                "answered": staging.state.answered,
                "left": session.left,
                "derives": session.derives,
                "report": session.live.report,
            }
            error = error or staging.state.error
        return status | {"error": _described(error) if error is not None else None}

    # -- the session

    def _open(self, info: PulseInitInfo) -> None:
        if not info.store or not info.stream:
            raise InputError("init_info needs a store and a stream")
        assert self._node is not None
        refusal = self._node.common(self._refused(info.owner))  # not each by its own clock
        if refusal is not None:
            raise refusal
        self.shutdown()
        self._opening = True
        require_plain_weights(self.model)
        require_no_derived_weights(self.model)
        self._error = None
        base = info.base or local_checkpoint(self.model_config.model, self.model_config.revision)
        around = partial(reloading, self.model, self.model_config)
        forms = loaded_forms(
            self.model, self.model_config.quantization, partial(set_current_vllm_config, self.vllm_config)
        )
        self._session = Session(self.model, info, self._node, self._learnt, base, around, forms)
        self._info = info
        self._heard_of_owner = time.monotonic()

    def _opened(self) -> Session:
        if self._session is None:
            raise InputError("the engine follows no stream", hint="Call connect(), or init_weight_transfer_engine.")
        return self._session

    def _refused(self, owner: str) -> ConcurrentUse | None:
        """Whoever drives the engine keeps it by being heard of."""
        if self._info is None or self._info.owner == owner:
            return None
        if time.monotonic() - self._heard_of_owner >= LEASE_SECONDS:
            return None
        return ConcurrentUse(
            f"another handle drives this engine along {self._info.stream!r}",
            hint=f"Close the other handle; one that died is forgotten after {LEASE_SECONDS:.0f} seconds.",
        )

    def _hear(self, owner: str) -> None:
        """Raises ConcurrentUse unless ``owner`` drives the engine."""
        if self._info is not None and self._info.owner != owner:
            raise ConcurrentUse(
                "another handle has taken this engine over", hint="One handle drives an engine: close this one."
            )
        self._heard_of_owner = time.monotonic()

    def _stage(self, version: int | None) -> None:
        self._error = None
        self._opened().staging.ask(version)

    def _noting(self, work: Callable[[], object]) -> None:
        """Runs ``work`` on all workers; where one fails, all note it, and the last one raises.

        vLLM's executor reads the workers' replies in order up to the first failure, and takes what it left for the
        replies to the next call. The workers that do not raise keep the session of vLLM open; see `_pulse`.
        """
        self._node = self._node or Node(_workers())
        failure = None
        try:
            work()
        except PulseError as error:
            failure = error
        except Exception as error:  # the other workers must hear of it, or wait for ever
            failure = PulseError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        failure = self._node.first_failure(failure)
        opening, self._opening = self._opening, False
        if failure is None:
            return
        self._error = failure
        self.left_open = not self._node.last
        if opening:
            self.shutdown()
        if self._node.last:
            raise failure


def _workers() -> Any:
    return parallel_state.get_world_group() if torch.distributed.is_initialized() else None


def _raise(error: PulseError | None) -> None:
    if error is not None:
        raise error


def _described(error: PulseError) -> dict[str, Any]:
    return {"kind": error.kind, "message": str(error), "hint": error.hint, "retryable": error.retryable}


def _pulse(self: Any, action: str, owner: str = "", version: int | None = None) -> dict[str, Any]:
    engine: PulseWeightTransferEngine = self.weight_transfer_engine
    if engine.left_open:
        engine.left_open = self._weight_update_active = False
    return engine.pulse(action, owner, version)


WorkerBase.pulse = _pulse  # how `collective_rpc` reaches the engine, over HTTP as well
