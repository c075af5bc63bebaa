"""The outer loop: local steps, then a round in which all trainers agree on the next theta (docs/loco.md, section 1)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from .._native import outer_step
from .._util.threads import ordered_map, to_the_end
from ..errors import CorruptMessage, Diverged, InputError, NonFinite, StateMismatch
from ..state.digest import StateDigest, state_digest
from .exchange import Exchange
from .gate import Floats
from .membership import Standing, meet
from .parameters import FlatBlock, Parameters


@dataclass(frozen=True, slots=True)
class Round:
    """What a finished round did, as one trainer saw it.

    ``entries`` of ``parameters`` passed this trainer's gate; its message took ``payload_bytes``; ``sent_bytes`` left
    its process in all (heads, padding and what it passed on for others). ``root`` is that of theta, FP32. ``seconds``
    by phase: "gate", "exchange", "decode", "update", "verify".
    """

    number: int
    trainers: int
    parameters: int
    entries: int
    payload_bytes: int
    sent_bytes: int
    root: str
    seconds: dict[str, float]

    @property
    def density(self) -> float:
        """Entries sent / parameters."""
        return self.entries / self.parameters


@dataclass(frozen=True, slots=True)
class Heard:
    """What is left to do when all of a round was heard, and cannot fail: ``update`` each block, then ``settle``."""

    entries: int
    payload_bytes: int
    update: Callable[[FlatBlock], None]
    settle: Callable[[], None]


class OuterLoop(ABC):
    """Hooks the inner optimizer's ``step``; after every ``sync_every`` steps one outer round runs inside that call.

    A context manager: entering it meets the other trainers (all take rank 0's weights if none has begun, or the outer
    state of those that are furthest), leaving it removes the hook. Outer state is FP32 in host memory, wherever the
    model is. Subclasses say what is exchanged.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        inner_optimizer: torch.optim.Optimizer,
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        threads: int | None = None,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        if sync_every < 1:
            raise InputError(
                f"sync_every is {sync_every}", hint="Give the number of inner steps in a round, 1 or more."
            )
        if not (outer_lr > 0 and 0 <= outer_momentum < 1):
            raise InputError(f"outer_lr {outer_lr} or outer_momentum {outer_momentum} is out of range")
        self.sync_every = sync_every
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.parameters = Parameters(model, inner_optimizer)
        self.threads, self.on_round = threads, on_round
        self.round = 0
        self.inner_step = 0
        self.last_round: Round | None = None
        self._group, self._timeout = group, timeout
        self._optimizer = inner_optimizer
        self._exchange: Exchange | None = None
        self._hook: Any = None
        self._seconds: dict[str, float] = {}
        self._messages: list[str] = []
        # Whether the state is a checkpoint's: the others may have gone on since with what was sent of it.
        self._loaded = False
        self.theta_flat = self.parameters.read()
        self.momentum_flat = np.zeros_like(self.theta_flat)

    # -- joining and leaving

    def __enter__(self) -> Self:
        if self._hook is None:
            if self.round == 0 and not self._loaded:
                self.theta_flat[:] = self.parameters.read()  # the model may have been loaded since
            self._join()
            self._hook = self._optimizer.register_step_post_hook(lambda *_: self._after_step())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the hook and gives up the group; the model stays as it is."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._part()

    def rejoin(self, group: dist.ProcessGroup | None = None) -> None:
        """Goes on with the trainers that are there now, after TrainerLost or when others come or go.

        If one has died, torch.distributed must be initialised anew. All trainers must call this or enter. Whoever is
        behind gets theta and the outer momentum. A round that was due runs at once; local steps that nobody has seen
        are not lost.
        """
        self._part()
        self._group = group
        self._join()

    def rewind(self) -> None:
        """Gives the model theta, the last common state, and forgets the local steps since."""
        self.inner_step = 0
        self.parameters.write(self.theta_flat)

    def _part(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _join(self) -> None:
        """Meets the others and takes up the common state; runs a round that is due."""
        if name := self.parameters.unsound(self.theta_flat):
            raise NonFinite(f"theta is not finite at {name!r}", hint="Start from weights without NaN and Inf.")
        exchange = Exchange(self._group, timeout=self._timeout)
        try:
            self._meet(exchange)
        except BaseException:
            exchange.close()
            raise
        self._exchange = exchange
        if self.inner_step >= self.sync_every:
            self._run_round()

    def _meet(self, exchange: Exchange) -> None:
        standing = Standing(
            specs=self.parameters.specs,
            settings=self._settings(),
            round=self.round,
            root=self._digest(self.theta_flat).root,
            momentum=self._digest(self.momentum_flat).root,
            messages=self._messages,
        )
        leader, leading, anyone_behind = meet(exchange, standing)
        if not anyone_behind:
            self._loaded = False
            return
        behind = (leading.round, leading.root, leading.momentum) != (self.round, standing.root, standing.momentum)
        theta, momentum = (x.copy() if behind else x for x in (self.theta_flat, self.momentum_flat))
        exchange.broadcast(theta, leader)
        exchange.broadcast(momentum, leader)

        def fall_in() -> None:
            self._loaded, loaded = False, self._loaded
            if not behind:
                return
            if leading.round != self.round:
                self._fall_in(leading, loaded)
            self.theta_flat[:], self.momentum_flat[:] = theta, momentum
            self.round, self.inner_step, self._messages = leading.round, 0, list(leading.messages)
            self.parameters.write(self.theta_flat)

        to_the_end(fall_in)

    # -- rounds

    def _after_step(self) -> None:
        self.inner_step += 1
        if self.inner_step >= self.sync_every:
            self._run_round()

    def _run_round(self) -> None:
        if self._exchange is None:
            raise InputError(
                "a round is due, but the trainers have not met",
                hint="Enter it as a context manager; after TrainerLost, call rejoin() or rewind().",
            )
        exchange, self._seconds = self._exchange, {}
        self.parameters.require(self._optimizer)
        before = exchange.sent
        try:
            heard = self._outer_round(exchange)

            def take_effect() -> None:
                with self._phase("update"):
                    self._each_block(heard.update)
                    heard.settle()
                    self.round, self.inner_step = self.round + 1, 0
                    self.parameters.write(self.theta_flat)

            to_the_end(take_effect)
            # After it has taken effect here: a trainer lost in the comparison leaves the others in a whole state.
            with self._phase("verify"):
                digest = self._digest(self.theta_flat)
                self._compare(exchange, digest)
        except (NonFinite, Diverged, CorruptMessage):  # on all trainers alike
            raise
        except BaseException:
            # The others may be elsewhere, and what was said may count with them: no second try before they have met.
            self._part()
            raise
        self.last_round = Round(
            number=self.round,
            trainers=exchange.size,
            parameters=self.parameters.count,
            entries=heard.entries,
            payload_bytes=heard.payload_bytes,
            sent_bytes=exchange.sent - before,
            root=digest.root,
            seconds=dict(self._seconds),
        )
        if self.on_round:
            self.on_round(self.last_round)

    @abstractmethod
    def _outer_round(self, exchange: Exchange) -> Heard:
        """Exchanges pseudo-gradients. Nothing of this object's common state changes."""

    def _fall_in(self, leading: Standing, loaded: bool) -> None:  # noqa: B027  # nothing to do without a residual
        """Called before theta is replaced by that of a later round. ``loaded``: this state is a checkpoint's, and no
        trainer has been met since."""

    def _update(self, block: FlatBlock, total: Floats, trainers: int) -> None:
        """One block of the outer step: Nesterov SGD on the mean."""
        theta, momentum = block.of(self.theta_flat), block.of(self.momentum_flat)
        outer_step(theta, momentum, total, trainers, self.outer_lr, self.outer_momentum)

    def _compare(self, exchange: Exchange, digest: StateDigest) -> None:
        """Raises Diverged on all trainers if theta is not the same on all of them."""
        if len(set(exchange.gather_short(bytes.fromhex(digest.root)))) > 1:
            self._name_difference(exchange)
            raise Diverged(f"round {self.round}: the trainers disagree on theta's root, but on no tensor")

    def _name_difference(self, exchange: Exchange) -> None:
        """Raises Diverged with the first tensor of theta or momentum that differs, if any. All trainers call it."""
        for what, flat in (("theta", self.theta_flat), ("momentum", self.momentum_flat)):
            digest = self._digest(flat)
            trees = exchange.gather_short(b"".join(digest.tensor(s) for s in digest.specs))
            for i, spec in enumerate(digest.specs):
                found = [tree[32 * i : 32 * i + 32] for tree in trees]
                if len(set(found)) > 1:
                    odd = [rank for rank, f in enumerate(found) if f != found[0]]
                    raise Diverged(f"round {self.round}: {what} of {spec.name!r} on trainers {odd} is not trainer 0's")

    # -- state

    def theta(self) -> dict[str, torch.Tensor]:
        """Theta by name, FP32 on the host, in this object's memory: copy or cast it, do not write."""
        return {name: torch.from_numpy(view) for name, view in self.parameters.views(self.theta_flat).items()}

    def state_dict(self) -> dict[str, Any]:
        """Theta, outer momentum, counters and what the subclass keeps: copies, by name.

        In mid-round (``inner_step`` above 0) save the model and the inner optimizer with it; the three together resume
        to the same bits.
        """
        return {
            "round": self.round,
            "inner_step": self.inner_step,
            "messages": list(self._messages),
            **{key: self._by_name(flat) for key, flat in self._arrays().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a saved state, before the first round or after it. Raises StateMismatch and NonFinite, with nothing
        changed.

        At a round's boundary (``inner_step`` 0) the model gets theta; in mid-round it is left to its own checkpoint.
        """
        fresh = {key: np.empty_like(flat) for key, flat in self._arrays().items()}
        missing = {"round", "inner_step", "messages", *fresh} - state.keys()
        if missing:
            raise StateMismatch(f"the saved state has no {sorted(missing)}")
        counters, messages = (state["round"], state["inner_step"]), state["messages"]
        told = isinstance(messages, list) and all(isinstance(m, str) for m in messages)
        if not told or not all(isinstance(n, int) and n >= 0 for n in counters):
            raise StateMismatch(f"the saved state's counters {counters} or messages are not what they should be")
        for key, flat in fresh.items():
            self.parameters.load(state[key], flat, f"saved {key}")

        def take_up() -> None:
            for key, flat in self._arrays().items():
                flat[:] = fresh[key]
            (self.round, self.inner_step), self._messages, self._loaded = counters, list(messages), True
            if self.inner_step == 0:
                self.parameters.write(self.theta_flat)

        to_the_end(take_up)

    def _arrays(self) -> dict[str, Floats]:
        """The flat arrays that a checkpoint holds."""
        return {"theta": self.theta_flat, "momentum": self.momentum_flat}

    def _by_name(self, flat: Floats) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(view.copy()) for name, view in self.parameters.views(flat).items()}

    def _settings(self) -> dict[str, object]:
        """What all trainers must have in common."""
        return {
            "method": type(self).__name__,
            "sync_every": self.sync_every,
            "outer_lr": self.outer_lr,
            "outer_momentum": self.outer_momentum,
        }

    # -- helpers

    def _digest(self, flat: Floats) -> StateDigest:
        return state_digest(self.parameters.state(flat), threads=self.threads)

    def _each_block(self, work: Callable[[FlatBlock], Any]) -> list[Any]:
        """``work`` on every block in threads; results in order."""
        return list(ordered_map(work, self.parameters.blocks, self.threads))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
