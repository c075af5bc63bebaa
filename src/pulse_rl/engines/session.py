"""One stream followed by one worker: what is live, what is staged, and the step from one to the
other.

The methods that touch live parameters are collective: they are called on all workers of an engine.
Where one of these fails, all do, and all roll back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ..errors import InputError, StateMismatch, UnsupportedTensor
from ..events import Metadata
from ..state.checkpoint import FILE_NAME, INDEX_NAME
from ..state.digest import StateDigest
from ..state.tensors import State, TensorSpec
from ..sync.subscriber import Subscriber
from .derived import DerivedLayers, PreQuantLayers
from .live import Change, Journal, LiveWeights, located
from .loader_map import LoaderMap, trace_loader
from .node import Node
from .proof import (
    Fresh,
    as_tensors,
    differing,
    load_all,
    padded,
    require_scales_taken,
    require_whole,
    shortage,
    trial_state,
    unlike,
    write_all,
)
from .staging import Prepared, Staged, Staging
from .transport import InitInfo

_log = logging.getLogger(__name__)
T = TypeVar("T")
_TAKE_OVER_SECONDS = 60.0


@dataclass(slots=True)
class ProvedMap:
    """What a worker knows of its model beyond one session: the map for the tensors ``specs``,
    whether it has been proved by the checkpoint that the model's own loader had read, and whether
    an update, or something else, has ``written`` to it. ``lost``: whether the engine has dropped
    what was in the parameters. ``proof``: how far that by a second model went: "computed", "bits
    only: ...", "left out: ..."; empty before it."""

    loader_map: LoaderMap | None = None
    specs: object = None
    proved: bool = False
    written: bool = False
    lost: bool = False
    proof: str = ""


class _Version(NamedTuple):
    """What the live parameters were moved to; the leader alone has more than the number."""

    number: int
    digest: StateDigest | None = None
    metadata: Metadata | None = None
    stream_id: str | None = None


class LeaderStep(NamedTuple):
    """What the leader decided: ``kind`` is "none", "sparse" or "full", from the ``live`` version to
    ``version``."""

    kind: str
    version: int
    live: int | None = None
    sequence: int = 0


@dataclass(slots=True)
class Live:
    """``version`` is None while the live parameters are not proved to be one. The leader alone has
    ``digest``, of that version, and ``stream_id``, of its stream. See `Session.live_version`."""

    version: int | None = None
    stream_id: str | None = None
    digest: StateDigest | None = None
    updates: int = 0
    report: dict[str, Any] = field(default_factory=dict)


class Session:
    """``base``: the path of the checkpoint that the engine was started from, None if unknown;
    ``loaded``: whether it has loaded that, and not dummy weights; ``reloading``: see
    `proof.load_all`; ``forms``: the layers that compute with what they derive from the checkpoint;
    ``fresh``: how to make another model, for a proof by that."""

    def __init__(
        self,
        model: torch.nn.Module,
        info: InitInfo,
        node: Node,
        known: ProvedMap,
        base: str | None,
        reloading: Callable[[], AbstractContextManager[None]],
        forms: PreQuantLayers | None = None,
        *,
        loaded: bool = True,
        fresh: Fresh | None = None,
    ) -> None:
        self._fresh = fresh
        self._loaded = loaded
        self.live = Live()
        self._forms = forms or PreQuantLayers()
        self._model = model
        self._reloading = reloading
        self._node = node
        self._map = known
        self._weights = LiveWeights(
            model, {n: t for layer in self._forms.layers for n, t in layer.live.items()}
        )
        self._audit_every = max(1, info.audit_every)
        node.open_folder()

        def make(listener: Any) -> Subscriber:
            subscriber = Subscriber(
                info.store,
                stream=info.stream,
                base=base,
                cache=info.cache,
                trusted_keys=info.trusted_keys or None,
                stream_id=info.stream_id,
                on_event=listener,
            )
            subscriber.allow_recreated = info.allow_recreated
            return subscriber

        try:
            self.staging = Staging(
                node,
                make,
                base=base,
                follow=info.follow,
                lay_out=self._lay_out,
                version=info.version,
            )
        except BaseException:
            node.close_folder()
            raise
        self._derived = DerivedLayers(self._forms, node, self.staging)

    @property
    def live_version(self) -> int | None:
        """The version that is live, None while none is proved to be. To the leader, a version of
        another stream of the name, which was recreated since, is none."""
        subscriber = self.staging.subscriber
        if subscriber is not None and self.live.stream_id not in (None, subscriber.stream_id):
            return None
        return self.live.version

    @property
    def live_root(self) -> str | None:
        """The root of the version that is live, on the leader."""
        digest = self.live.digest
        return None if digest is None or self.live_version is None else digest.root

    @property
    def derives(self) -> bool:
        """Whether layers compute with what they derive from the checkpoint."""
        return bool(self._forms.layers)

    @property
    def proof(self) -> str:
        """See `ProvedMap`."""
        return self._map.proof

    @property
    def left(self) -> int:
        """How much `prepare` has still to do before the pause; of meaning on the leader."""
        if self._map.loader_map is None:
            return 1
        return self._derived.left(self.live_version)

    def forget(self) -> None:
        """The live parameters are no known version any more."""
        self.live.version = None
        self._derived.forget()

    def close(self) -> None:
        self.staging.close()
        self._node.close_folder()

    # -- before the pause

    def prepare(self) -> None:
        """Learns the map, if that has not been done, and derives some of the layers that are
        derived. May return with something `left`. Collective."""
        self._trace_map()
        if self._map.loader_map is not None:
            self._derived.advance(self._map.loader_map, self._node.common(self.live_version))

    def _trace_map(self) -> None:
        """Once for the tensors of the stream; and proves the map by the checkpoint that the engine
        loaded. Without such a checkpoint the version of the live parameters is unknown, and the
        next update writes all. Raises UnsupportedTensor where the engine computes with something
        else than the checkpoint that it has loaded."""
        specs = self._node.common(self._node.together(self._held_tensors))
        if self._map.specs == specs:
            return
        loader_map = self._node.together(lambda: self._traced(State(specs[0], {}, specs[1])))
        require_scales_taken(specs[0], self._node.gathered(loader_map.unused))
        if not self._node.alone:
            boxes = self._node.on_node(loader_map.boxes | loader_map.derived)
            self._node.together(lambda: require_whole(specs[0], boxes))
        # The first proof: what the engine loaded itself, read back through the map, is its
        # checkpoint.
        base = self.staging.base_digest
        comparable = self._node.common(base is not None and _covers(base, specs[0]))
        self._map.loader_map = loader_map
        wrong = self._differing(base, self.staging.base_state) if comparable else []
        if wrong and self._loaded and not self._map.written:
            self._map.loader_map = None
            raise _not_the_checkpoint(wrong)
        # The second proof does not go through the map.
        strange = self._unlike_fresh(State(specs[0], {}, specs[1]))
        if strange:
            self._map.loader_map = None
            raise _not_what_it_computes(strange)
        self._map.specs, self._map.proved = specs, comparable and not wrong
        if self._map.proved:
            self.live.version = self._node.shared(self._base_version())
            self.live.digest, self.live.stream_id = base, self._stream_id()

    def _pad(self) -> None:
        """Where all that was in the parameters is lost, or they never had what a loader leaves,
        fills those again of which the loader fills a part with a constant, for the stream to be
        written over it."""
        loader_map = self._map.loader_map
        dummy = not self._loaded and not self._map.proved
        if not (self._map.lost or dummy) or loader_map is None:
            return
        for name, parameter in self._model.named_parameters():
            constants = loader_map.padding.get(name, frozenset())
            if len(constants) > 1:
                raise UnsupportedTensor(
                    f"the engine has lost its {name!r}, which its loader pads with "
                    f"{sorted(constants)}",
                    hint="Restart the engine.",
                )
            for constant in constants:
                parameter.data.fill_(constant)

    def _unlike_fresh(self, stream: State) -> list[str]:
        """The modules that compute something else than those of a fresh model, once both have
        weights of trial for the tensors of ``stream``. The live weights are what they were then.
        Notes the ``proof``. Collective."""
        loader_map = self._map.loader_map
        if self._fresh is None or loader_map is None:
            return self._say("left out: this kind of engine makes no second model")
        # What is allocated below is bounded here, before: a process that the kernel kills takes its
        # requests with it.
        short = self._node.together(lambda: shortage(self._weights.flat.values(), self._node.size))
        short = next((found for found in self._node.gathered(short) if found is not None), None)
        if short is not None:
            return self._say(f"left out: no memory for a second model ({short})")
        self._node.together(self._pad)
        fresh, trial = self._fresh, trial_state(stream.specs, stream.aliases)
        other = self._node.together(lambda: fresh.make(as_tensors(trial)))
        journal = Journal(self._weights)
        try:
            leading = trial if self._node.leader else None
            derived = self._derived.all_changes(loader_map, leading)
            write_all(self._node, journal, loader_map, leading)
            self._node.together(lambda: journal.apply(derived))
            weights = padded(loader_map, self._model)
            wrong, failed = self._node.together(
                lambda: unlike(self._model, other, fresh.run, weights)
            )
        finally:
            journal.roll_back()
        failed = next((found for found in self._node.gathered(failed) if found is not None), None)
        self._say(
            "computed"
            if failed is None
            else f"bits only: the model does not run by itself ({failed})"
        )
        return sorted({name for names in self._node.gathered(wrong) for name in names})

    def _say(self, proof: str) -> list[str]:
        """Notes how far the proof by a second model went, in the log too unless it was whole.
        Returns no names."""
        self._map.proof = proof
        if proof != "computed" and self._node.leader:
            _log.warning("proof of the engine by a second model %s", proof)
        return []

    def _traced(self, state: State) -> LoaderMap:
        with self._forms.within():
            return trace_loader(self._model, state, self._forms.names)

    def _held_tensors(self) -> Any:
        """The tensors of the stream as the leader holds them: (specs, aliases)."""
        staging = self.staging
        if staging.subscriber is None:
            return None
        if staging.held is None:
            raise staging.state.error or InputError(
                "nothing is staged yet", hint="Wait until the status shows a staged version."
            )
        return staging.held.specs, staging.held.aliases

    def _base_version(self) -> int | None:
        """The version of the stream that the engine's checkpoint is, None if it is none of them;
        leader only."""
        staging = self.staging
        if staging.base_digest is None or staging.held is None:
            return None
        if staging.prepared is not None:
            return staging.prepared.staged.previous
        return staging.held.version if staging.held.root == staging.base_digest.root else None

    def _lay_out(self, staged: Staged) -> list[Change] | None:
        loader_map = self._map.loader_map
        if loader_map is None:
            return None
        return [
            change
            for name, (indices, values) in staged.changes.items()
            for change in located(loader_map, name, indices, values)
        ]

    def stage(self, version: int, seconds: float) -> None:
        """Waits until ``version`` is staged, for at most ``seconds``. Collective; raises
        EngineError after that, or what the look at the store raised."""
        self._node.together(lambda: self.staging.wait_for(version, seconds))

    # -- in the pause

    def update(self, version: int | None) -> None:
        """Moves the live parameters to ``version``, None: what is staged. They are at the version
        before when this raises. Collective."""
        started = time.perf_counter()
        self._trace_map()
        with self._steady():
            self._update(version, started)
        self.staging.release()

    @contextmanager
    def _steady(self) -> Iterator[None]:
        """Within, the host state does not move, where layers are derived from it."""
        with self.staging.lock if self._forms.layers else nullcontext():
            yield

    def _update(self, version: int | None, started: float) -> None:
        # 1. All workers agree on the step, which the leader decides.
        with self.staging.gate:
            step: LeaderStep = self._node.shared(self._node.together(lambda: self._decide(version)))
            if len(set(self._node.gathered((step.kind, step.version)))) > 1:
                raise StateMismatch(
                    "the engine's nodes have staged different versions", hint="Sync again."
                )
            prepared = self._node.together(lambda: self._awaited(step))
        if step.kind == "none":
            return
        # 2. What is derived is made aside; the journal keeps the old bits of all that is written
        # from here on.
        derived = self._derived_changes(step)
        journal = Journal(self._weights)
        self._map.written = True
        before, self.live.version = self.live.version, None
        begun = time.perf_counter()
        try:
            # 3. The write: the staged changes, or the whole host state.
            if prepared is not None:
                self._scatter(journal, prepared)
                now = _Version(step.version, prepared.digest, prepared.metadata, prepared.stream_id)
            else:
                now = self._write_all(journal)
            self._node.together(lambda: journal.apply(derived))
            self._node.together(self._weights.synchronize)
            written = time.perf_counter()
            # 4. The audit, of every write of the whole state and of one update in `audit_every`.
            due = prepared is None or self.live.updates % self._audit_every == 0
            if due:
                wrong = self._differing(now.digest, self.staging.host_state)
                if wrong:
                    before = (
                        None  # wrong since an unknown version: the next update writes everything
                    )
                    raise _not_equal(now, wrong)
                self._map.proved = True
        except BaseException:
            journal.roll_back()
            self.live.version = before
            raise
        self._map.lost = self._map.lost and prepared is not None  # not after a whole state
        # 5. The version is live: the subscriber's update is acknowledged, and the report says what
        # it cost.
        self._derived.forget()
        self.live.version, self.live.digest, self.live.stream_id = (
            now.number,
            now.digest,
            now.stream_id,
        )
        self.live.updates += 1
        self.staging.acknowledge(now.number)
        cost = self.staging.state.cost
        self.live.report = {
            "version": now.number,
            "previous": step.live,
            "root": now.digest.root if now.digest else "",
            "metadata": dict(now.metadata or {}),
            "full": prepared is None,
            "prepare_seconds": begun - started,
            "apply_seconds": written - begun,
            "audit_seconds": time.perf_counter() - written if due else None,
            "fetch_seconds": cost.fetch_seconds,
            "verify_seconds": cost.verify_seconds,
            "fetched_bytes": cost.fetched_bytes,
        }

    def audit(self) -> list[str]:
        """The names of tensors whose live elements are not those of the live version. Collective;
        raises InputError while no version is live."""
        live = self._node.common(self.live_version)
        if live is None:
            raise InputError("no version is live yet", hint="Call sync() first.")
        with self._steady():
            self._require_host_at(live)
            wrong = self._differing(self.live.digest, self.staging.host_state)
        if wrong:
            self.live.version = None
        return wrong

    def prove(self) -> list[str]:
        """The names of modules that do not compute with what an update writes. Collective; raises
        InputError where nothing is staged, or the engine cannot make another model."""
        if self._fresh is None:
            raise InputError("this engine cannot be compared with a fresh model")
        specs = self._node.common(self._node.together(self._held_tensors))
        self._trace_map()
        with self._steady():
            wrong = self._unlike_fresh(State(specs[0], {}, specs[1]))
        if self._map.proof.startswith("left out"):
            raise InputError(
                f"the engine cannot be compared with a second model, which was {self._map.proof}"
            )
        return wrong

    def _stream_id(self) -> str | None:
        return self.staging.subscriber.stream_id if self.staging.subscriber is not None else None

    def _derived_changes(self, step: LeaderStep) -> list[Change]:
        loader_map = self._map.loader_map
        if not self._forms.layers or loader_map is None:
            return []
        return self._derived.changes(loader_map, step.live, step.version)

    def _require_host_at(self, live: int) -> None:
        """What is derived can be compared with what the host state derives to, and so for the
        host's version only."""
        subscriber = self.staging.subscriber
        host = self._node.common(subscriber.version if subscriber is not None else None)
        if self._forms.layers and host != live:
            raise StateMismatch(
                f"version {live} is live, and the host holds version {host} already",
                hint="Quantized layers are audited against the host state: call sync(), then "
                "audit().",
            )

    def _decide(self, version: int | None) -> LeaderStep:
        """What to do, on the leader; nothing on the others."""
        staging, live = self.staging, self.live_version
        if staging.subscriber is None:
            return LeaderStep("none", 0)
        prepared = staging.prepared
        staged = prepared.staged if prepared is not None else None
        newest = staged.version if staged is not None else staging.subscriber.version
        assert newest is not None
        if version is not None and version != newest and version != live:
            raise StateMismatch(
                f"version {newest} is staged, not {version}",
                hint="Stage a version before the update to it; to an older one only another "
                "session goes.",
            )
        if live is not None and (live == version or live >= newest):
            return LeaderStep("none", live, live)
        if (
            staged is not None
            and staged.previous is not None
            and live is not None
            and staged.previous <= live
        ):
            return LeaderStep("sparse", staged.version, live, staged.sequence)
        return LeaderStep("full", newest, live)

    def _awaited(self, step: LeaderStep) -> Prepared | None:
        """The staged update that the leader decided on: this worker's thread is about to take it
        over."""
        deadline = time.monotonic() + _TAKE_OVER_SECONDS
        while step.kind == "sparse":
            prepared = self.staging.prepared
            if prepared is not None and prepared.staged.sequence == step.sequence:
                return prepared
            if time.monotonic() > deadline:
                raise self.staging.state.error or StateMismatch(
                    "a worker did not take over what its node has staged"
                )
            time.sleep(0.001)
        return None

    def _scatter(self, journal: Journal, prepared: Prepared) -> None:
        def write() -> None:
            changes = (
                prepared.changes if prepared.changes is not None else self._lay_out(prepared.staged)
            )
            journal.apply(changes or [])

        self._node.together(write)

    def _write_all(self, journal: Journal) -> _Version:
        """Writes the whole host state: through the map if it is proved, or leads into forms that
        layers are derived from; else the model's loader does, and the audit that follows proves the
        map by that."""
        assert self._map.loader_map is not None
        with (
            self.staging.lock
        ):  # the version is the one that the host holds now, which may have moved on since
            follower = self.staging.subscriber
            state = follower.state if follower else None
            if self._map.proved or self._forms.layers:
                self._node.together(self._pad)
                write_all(self._node, journal, self._map.loader_map, state)
            else:
                load_all(self._node, journal, self._model, self._reloading, state)
            if follower is None:
                return _Version(self._node.shared(0))
            assert follower.version is not None
            number = self._node.shared(follower.version)
            return _Version(number, follower.digest, follower.manifest.metadata, follower.stream_id)

    def _differing(
        self, digest: StateDigest | None, state: Callable[[], State | None]
    ) -> list[str]:
        """The tensors that are not those of the version with ``digest``, of which ``state`` is;
        leader only."""
        loader_map = self._map.loader_map
        assert loader_map is not None
        wrong = differing(self._node, self._weights, loader_map, digest)
        if self._forms.layers:
            wrong += self._derived.differing(loader_map, state())
        return wrong


def _not_equal(now: _Version, wrong: list[str]) -> StateMismatch:
    return StateMismatch(
        f"{len(wrong)} live tensors are not those of version {now.number}: {', '.join(wrong[:3])}",
        hint="The update was rolled back, and the next one writes all weights. If no one else "
        "writes to the engine's "
        "weights, please report this.",
    )


def _covers(base: StateDigest, specs: tuple[TensorSpec, ...]) -> bool:
    """Whether the checkpoint has the tensors ``specs`` of the stream, as they are in it."""
    return {(spec.name, spec.dtype, spec.shape) for spec in specs} <= {
        (s.name, s.dtype, s.shape) for s in base.specs
    }


def _not_the_checkpoint(wrong: list[str]) -> UnsupportedTensor:
    return UnsupportedTensor(
        f"the engine does not compute with the checkpoint that it was started from: {len(wrong)} "
        "tensors differ, "
        f"{', '.join(wrong[:3])}",
        hint="Something changes these weights when they are loaded, or has changed them since: "
        "such an engine cannot "
        "follow a stream. If it was started from another checkpoint, name that as base.",
    )


def _not_what_it_computes(strange: list[str]) -> UnsupportedTensor:
    return UnsupportedTensor(
        f"the engine's {', '.join(map(repr, strange[:3]))} do not compute with the weights that "
        "an update would write "
        f"({len(strange)} modules)",
        hint="Something keeps copies of these weights, or changes them, outside of what the "
        "engine does to each module "
        "when it is loaded: start it without.",
    )


def local_checkpoint(model: str, revision: str | None) -> str | None:
    """Where the checkpoint ``model``, a path or a name on the Hugging Face hub, lies on this
    machine."""
    if Path(model).exists():
        return model
    from huggingface_hub import try_to_load_from_cache

    for name in (FILE_NAME, INDEX_NAME):
        file = try_to_load_from_cache(model, name, revision=revision)
        if isinstance(file, str):
            return str(Path(file).parent)
    return None
