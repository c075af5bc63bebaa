"""One stream followed by one worker: what is live, what is staged, and the step from one to the
other.

The methods that touch live parameters are collective: they are called on all workers of an engine.
Where one of these fails, all do, and all roll back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._util.settings import counted
from ..errors import InputError, StateMismatch, UnsupportedTensor
from ..follow.checkpoint import FILE_NAME, INDEX_NAME
from ..state.digest import StateDigest
from ..state.tensors import State, TensorSpec
from .derived_params import DerivedLayers, PostLoadLayers
from .live import Change, Journal, LiveWeights, LoaderMap, located, trace_loader
from .node import Node, Prepared, Staged, Staging, Version
from .self_check import (
    Fresh,
    as_tensors,
    differing,
    load_all,
    padded,
    persistent_buffers,
    require_scales_taken,
    require_tied,
    require_whole,
    shortage,
    tied_heads,
    trial_state,
    unlike,
    write_all,
)
from .transport import InitInfo

_log = logging.getLogger(__name__)
_TAKE_OVER_SECONDS = 60.0


@dataclass(slots=True)
class VerifiedMap:
    """What a worker knows of its model beyond one session: the map for the tensors ``held``,
    whether it has been proved by the checkpoint that the model's own loader had read, and whether
    an update, or something else, has ``written`` to it. ``lost``: whether the engine has dropped
    what was in the parameters. ``proof``: how far that by a second model went: "computed", "bits
    only: ...", "left out: ..."; empty before it. ``unused``: tensors of the stream that no worker
    takes. ``ties``: see `LoaderMap`. ``buffers``: the bits of those that the stream does not fill,
    where dummy weights had left noise."""

    loader_map: LoaderMap | None = None
    held: object = None
    proved: bool = False
    written: bool = False
    lost: bool = False
    proof: str = ""
    unused: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


class LeaderStep(NamedTuple):
    """What the leader decided: ``kind`` is "none", "sparse" or "full", from the ``live`` version to
    ``version``."""

    kind: str
    version: int
    live: int | None = None
    sequence: int = 0


class Session:
    """``base``: the path of the checkpoint that the engine was started from, None if unknown;
    ``loaded``: whether it has loaded that, and not dummy weights; ``reloading``: see
    `proof.load_all`; ``forms``: the layers that compute with what they derive from the checkpoint;
    ``fresh``: how to make another model, for a proof by that; ``initial_buffers``: makes the
    model's buffers as its class does, None if the engine cannot.

    ``live`` is None while the live parameters are not proved to be a version; ``report``: on the
    last update.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        info: InitInfo,
        node: Node,
        known: VerifiedMap,
        base: str | None,
        reloading: Callable[[], AbstractContextManager[None]],
        forms: PostLoadLayers,
        *,
        loaded: bool = True,
        fresh: Fresh | None = None,
        initial_buffers: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        self._fresh = fresh
        self._initial_buffers = initial_buffers
        self._loaded = loaded
        self.live: Version | None = None
        self.report: dict[str, Any] = {}
        self._updates = 0
        self._forms = forms
        #: Whether layers compute with what they derive from the checkpoint.
        self.derives = bool(forms.layers)
        self._model = model
        self._reloading = reloading
        self._node = node
        self.map = known
        derived = {name: t for layer in forms.layers for name, t in layer.live.items()}
        self._weights = LiveWeights(model, derived)
        self._audit_every = max(1, info.audit_every)
        node.open_folder()
        try:
            self.staging = Staging(node, info, base, self._lay_out)
        except BaseException:
            node.close_folder()
            raise
        self._derived = DerivedLayers(self._forms, node, self.staging)

    @property
    def live_version(self) -> int | None:
        """The version that is live, None while none is proved to be. To the leader, a version of
        another stream of the name, which was recreated since, or of a history that its store has
        lost, is none."""
        live, subscriber, held = self.live, self.staging.subscriber, self.staging.held
        if live is None:
            return None
        if subscriber is not None and live.stream_id not in (None, subscriber.stream_id):
            return None
        if held and held.digest and live.digest and held.number == live.number:
            return live.number if held.digest.root == live.digest.root else None
        return live.number

    @property
    def live_root(self) -> str | None:
        """The root of the version that is live, on the leader."""
        if self.live is None or self.live.digest is None or self.live_version is None:
            return None
        return self.live.digest.root

    @property
    def left(self) -> int:
        """How much `prepare` has still to do before the pause; of meaning on the leader."""
        if self.map.loader_map is None:
            return 1
        return self._derived.left(self.live_version)

    def forget(self) -> None:
        """The live parameters are no known version any more."""
        self.live = None
        self._derived.forget()

    def close(self) -> None:
        self.staging.close()
        self._node.close_folder()

    # -- before the pause

    def prepare(self) -> None:
        """Learns the map, if that has not been done, and derives some of the layers that are
        derived. May return with something `left`. Collective."""
        self._trace_map()
        self._derived.advance(self._loader_map, self._node.common(self.live_version))

    @property
    def _loader_map(self) -> LoaderMap:
        """The map, which was traced."""
        assert self.map.loader_map is not None
        return self.map.loader_map

    def _trace_map(self) -> None:
        """Once for the tensors of the stream; and proves the map by the checkpoint that the engine
        loaded. Without such a checkpoint the version of the live parameters is unknown, and the
        next update writes all. Raises UnsupportedTensor where the engine computes with something
        else than the checkpoint that it has loaded."""
        # 1. The map for the tensors that the leader holds.
        held = self._node.common(self._node.together(self._held_tensors))
        if self.map.held == held:
            return
        specs, aliases = held
        loader_map = self._node.together(lambda: self._traced(State(specs, {}, aliases)))
        everywhere = self._node.gathered(loader_map.unused)
        require_scales_taken(specs, everywhere)
        unused = sorted(set.intersection(*map(set, everywhere)))
        # Whether the engine has no head: it gives hidden states or scores.
        pools = getattr(self._model, "is_pooling_model", False)
        ties = tied_heads(specs, loader_map, () if pools else unused)
        self._require_tied(ties, self.staging.held)
        if not self._node.alone:
            boxes = self._node.on_node(loader_map.boxes | loader_map.derived)
            self._node.together(lambda: require_whole(specs, boxes))
        # 2. The first proof: what the engine loaded itself, read back through the map, is its
        # checkpoint.
        base = self.staging.base_digest
        # Whether the checkpoint has the tensors of the stream, as they are in it.
        there = {(spec.name, spec.dtype, spec.shape) for spec in base.specs} if base else set()
        wanted = {(spec.name, spec.dtype, spec.shape) for spec in specs}
        comparable = self._node.common(base is not None and wanted <= there)
        base_names = self._node.common([spec.name for spec in base.specs] if base else None)
        self._node.together(lambda: self._fill_buffers(loader_map, specs, base_names))
        self.map.loader_map = loader_map
        wrong = self._differing(base, self.staging.base_state) if comparable else []
        if wrong and self._loaded and not self.map.written:
            self.map.loader_map = None
            raise UnsupportedTensor(
                "the engine does not compute with the checkpoint that it was started from: "
                f"it differs in {counted(len(wrong), 'tensor')}, {', '.join(wrong[:3])}",
                hint="Something changes these weights when they are loaded, or has changed them "
                "since: such an engine cannot follow a stream. If it was started from another "
                "checkpoint, name that as base.",
            )
        # 3. The second proof does not go through the map.
        strange = self._unlike_fresh(State(specs, {}, aliases))
        if strange:
            self.map.loader_map = None
            raise UnsupportedTensor(
                f"the engine's {', '.join(map(repr, strange[:3]))} do not compute with the "
                f"weights that an update would write ({counted(len(strange), 'module')})",
                hint="Something keeps copies of these weights, or changes them, outside of what "
                "the engine does to each module when it is loaded: start it without.",
            )
        # 4. What is live: the version that the checkpoint is, if it is one.
        self.map.held, self.map.proved = held, comparable and not wrong
        self.map.unused, self.map.ties = tuple(unused), tuple(ties)
        if unused and self._node.leader:
            shown = ", ".join(unused[:5])
            _log.warning(
                "%s of the stream without a place: %s", counted(len(unused), "tensor"), shown
            )
        if self.map.proved:
            number, subscriber = self._node.shared(self._base_version()), self.staging.subscriber
            stream_id = subscriber.stream_id if subscriber is not None else None
            self.live = None if number is None else Version(number, base, stream_id=stream_id)

    def _pad(self) -> None:
        """Where all that was in the parameters is lost, or they never had what a loader leaves,
        fills those again of which the loader fills a part with a constant, for the stream to be
        written over it."""
        dummy = not self._loaded and not self.map.proved
        if not self.map.lost and not dummy:
            return
        for name, parameter in self._model.named_parameters():
            constants = self._loader_map.padding.get(name, frozenset())
            if len(constants) > 1:
                raise UnsupportedTensor(
                    f"the engine has lost its {name!r}, which its loader pads with "
                    f"{sorted(constants)}",
                    hint="Restart the engine.",
                )
            for constant in constants:
                parameter.data.fill_(constant)

    def _fill_buffers(
        self, loader_map: LoaderMap, specs: tuple[TensorSpec, ...], base: list[str] | None
    ) -> None:
        """Gives persistent buffers that the stream does not fill what the model's class makes them,
        where dummy weights have left noise in them. ``base``: the names of the engine's checkpoint.

        Raises UnsupportedTensor for a buffer whose value is known to a checkpoint alone."""
        if self._loaded or self.map.proved or self.map.buffers:
            return
        mine = persistent_buffers(self._model)
        left = {name: buffer for name, buffer in mine.items() if name not in loader_map.filled}
        if not left:
            return
        made = self._initial_buffers() if self._initial_buffers is not None else {}
        streamed = {spec.name for spec in specs}
        # By the last two parts of a name: what comes before is not the same in all checkpoints.
        stored = {_tail(name) for name in base or () if name not in streamed}
        for name, buffer in left.items():
            initial = made.get(name)
            if initial is not None and torch.equal(initial, buffer):
                continue
            if initial is None or base is None or _tail(name) in stored:
                raise UnsupportedTensor(
                    f"the engine was started with dummy weights, and the stream does not fill its "
                    f"buffer {name!r}",
                    hint="Publish buffers, too: checkpoint_weights(model) or state_dict(), not "
                    "named_parameters(). Or start the engine from its checkpoint, without "
                    "--load-format dummy.",
                )
            buffer.data.copy_(initial)
            self.map.buffers[name] = initial.detach().clone()

    def _unlike_fresh(self, stream: State) -> list[str]:
        """The modules that compute something else than those of a fresh model, once both have
        weights of trial for the tensors of ``stream``. The live weights are what they were then.
        Notes the ``proof``. Collective."""
        if self._fresh is None:
            return self._say("left out: this kind of engine makes no second model")
        # What is allocated below is bounded here, before: a process that the kernel kills takes its
        # requests with it.
        short = self._node.together(lambda: shortage(self._weights.flat.values(), self._node.size))
        short = self._node.first(short)
        if short is not None:
            return self._say(f"left out: no memory for a second model ({short})")
        self._node.together(self._pad)
        fresh, loader_map = self._fresh, self._loader_map
        trial = trial_state(stream.specs, stream.aliases)
        other = self._node.together(lambda: fresh.make(as_tensors(trial)))
        mine = persistent_buffers(self._model)
        for name, buffer in persistent_buffers(other).items():
            if name in mine and name not in loader_map.filled:
                buffer.data.copy_(mine[name])  # no stream decides on it
        journal = Journal(self._weights)
        try:
            leading = trial if self._node.leader else None
            derived = self._derived.all_changes(loader_map, leading)
            write_all(self._node, journal, loader_map, leading)
            self._node.together(lambda: journal.apply(derived))
            weights = padded(loader_map, self._model)
            compare = partial(unlike, self._model, other, fresh.run, weights)
            wrong, failed = self._node.together(compare)
        finally:
            journal.roll_back()
        failed = self._node.first(failed)
        if failed is None:
            self._say("computed")
        else:
            self._say(f"bits only: the model does not run by itself ({failed})")
        return self._node.union(wrong)

    def _say(self, proof: str) -> list[str]:
        """Notes how far the proof by a second model went, in the log too unless it was whole.
        Returns no names."""
        self.map.proof = proof
        if proof != "computed" and self._node.leader:
            _log.warning("proof of the engine by a second model %s", proof)
        return []

    def _traced(self, state: State) -> LoaderMap:
        with self._forms.within():
            return trace_loader(self._model, state, self._forms.names)

    def _require_tied(self, ties: Iterable[tuple[str, str]], version: Version | None) -> None:
        digest = version.digest if version is not None and self._node.leader else None
        self._node.together(lambda: require_tied(ties, digest))

    def _held_tensors(self) -> Any:
        """The tensors of the stream as the leader holds them: (specs, aliases)."""
        staging = self.staging
        if staging.subscriber is None:
            return None
        if staging.held is None or staging.held.digest is None:
            raise staging.error or InputError(
                "nothing is staged yet", hint="Wait until the status shows a staged version."
            )
        return staging.held.digest.specs, staging.held.aliases

    def _base_version(self) -> int | None:
        """The version of the stream that the engine's checkpoint is, None if it is none of them;
        leader only."""
        base, held, prepared = self.staging.base_digest, self.staging.held, self.staging.prepared
        if base is None or held is None or held.digest is None:
            return None
        if prepared is not None:
            return prepared.staged.previous
        return held.number if held.digest.root == base.root else None

    def _lay_out(self, staged: Staged) -> list[Change] | None:
        loader_map = self.map.loader_map
        if loader_map is None:
            return None
        changes = [located(loader_map, name, *found) for name, found in staged.changes.items()]
        return [*chain.from_iterable(changes)]

    def stage(self, version: int, seconds: float) -> None:
        """Waits until ``version`` is staged, for at most ``seconds``. Collective; raises
        EngineError after that, or what the poll of the store raised."""
        self._node.together(lambda: self.staging.wait_for(version, seconds))

    # -- in the pause

    def update(self, version: int | None) -> None:
        """Moves the live parameters to ``version``, None: what is staged. They are at the version
        before when this raises. Collective."""
        self._trace_map()
        with self._steady():
            self._update(version)
        self.staging.release()

    def _steady(self) -> AbstractContextManager[Any]:
        """Within, the host state does not move, where layers are derived from it."""
        return self.staging.lock if self._forms.layers else nullcontext()

    def _update(self, version: int | None) -> None:
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
        derived = self._derived.changes(self._loader_map, step.live, step.version)
        journal = Journal(self._weights)
        self.map.written = True
        before, self.live = self.live, None
        begun = time.perf_counter()
        try:
            # 3. The write: the staged changes, or the whole host state.
            if prepared is not None:
                now = prepared.target
                self._node.together(lambda: journal.apply(self._changes_of(prepared)))
            else:
                now = self._write_all(journal)
            self._require_tied(self.map.ties, now)
            self._node.together(lambda: journal.apply(derived))
            self._node.together(self._weights.synchronize)
            written = time.perf_counter()
            # 4. The audit, of every write of the whole state and of one update in `audit_every`.
            due = prepared is None or self._updates % self._audit_every == 0
            if due:
                wrong = self._differing(now.digest, self.staging.host_state)
                if wrong:
                    before = None  # wrong since an unknown version: the next writes everything
                    raise StateMismatch(
                        f"{len(wrong)} live tensors are not those of version {now.number}: "
                        f"{', '.join(wrong[:3])}",
                        hint="The update was rolled back, and the next one writes all weights. If "
                        "no one else writes to the engine's weights, please report this.",
                    )
                self.map.proved = True
        except BaseException:
            journal.roll_back()
            self.live = before
            raise
        self.map.lost = self.map.lost and prepared is not None  # not after a whole state
        # 5. The version is live: the subscriber's update is acknowledged, and the report says what
        # it cost.
        self._derived.forget()
        self.live = now
        self._updates += 1
        self.staging.acknowledge(now.number)
        cost = self.staging.cost
        self.report = {
            "version": now.number,
            "previous": step.live,
            "root": now.digest.root if now.digest else "",
            "metadata": dict(now.metadata or {}),
            "full": prepared is None,
            "apply_seconds": written - begun,
            "audit_seconds": time.perf_counter() - written if due else None,
            "lag_seconds": None if cost.created is None else time.time() - cost.created,
            **asdict(cost),
        }

    def audit(self) -> list[str]:
        """The names of tensors whose live elements are not those of the live version. Collective;
        raises InputError while no version is live."""
        live = self._node.common(self.live_version)
        if live is None:
            raise InputError("no version is live yet", hint="Call sync() first.")
        with self._steady():
            # What is derived can be compared with what the host state derives to, and so for the
            # host's version only.
            subscriber = self.staging.subscriber
            host = self._node.common(subscriber.version if subscriber is not None else None)
            if self._forms.layers and host != live:
                raise StateMismatch(
                    f"version {live} is live, and the host holds version {host} already",
                    hint="Quantized layers are audited against the host state: call sync(), then "
                    "audit().",
                )
            digest = self.live.digest if self.live is not None else None
            wrong = self._differing(digest, self.staging.host_state)
        if wrong:
            self.live = None
        return wrong

    def prove(self) -> list[str]:
        """The names of modules that do not compute with what an update writes. Collective; raises
        InputError where nothing is staged, or the engine cannot make another model."""
        if self._fresh is None:
            raise InputError("this engine cannot be compared with a fresh model")
        specs, aliases = self._node.common(self._node.together(self._held_tensors))
        self._trace_map()
        with self._steady():
            wrong = self._unlike_fresh(State(specs, {}, aliases))
        if self.map.proof.startswith("left out"):
            raise InputError(
                f"the engine cannot be compared with a second model, which was {self.map.proof}"
            )
        return wrong

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
        previous = staged.previous if staged is not None else None
        if staged is not None and live is not None and previous is not None and previous <= live:
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
                raise self.staging.error or StateMismatch(
                    "a worker did not take over what its node has staged"
                )
            time.sleep(0.001)
        return None

    def _changes_of(self, prepared: Prepared) -> list[Change]:
        if prepared.changes is not None:
            return prepared.changes
        return self._lay_out(prepared.staged) or []  # it was staged before the map was known

    def _write_all(self, journal: Journal) -> Version:
        """Writes the whole host state: through the map if it is proved, or leads into forms that
        layers are derived from; else the model's loader does, and the audit that follows proves the
        map by that."""
        # The version is the one that the host holds now, which may have moved on since.
        with self.staging.lock:
            now, state = self.staging.host_version(), self.staging.host_state()
            if self.map.proved or self._forms.layers:
                self._node.together(self._pad)
                write_all(self._node, journal, self._loader_map, state)
            else:
                load_all(self._node, journal, self._model, self._reloading, state)
            number = self._node.shared(now.number if now is not None else None)
            assert number is not None
            return now or Version(number)

    def _differing(
        self, digest: StateDigest | None, state: Callable[[], State | None]
    ) -> list[str]:
        """The tensors that are not those of the version with ``digest``, of which ``state`` is;
        leader only."""
        wrong = differing(self._node, self._weights, self._loader_map, digest)
        mine = dict(self._model.named_buffers())
        changed = {n for n, bits in self.map.buffers.items() if not torch.equal(mine[n], bits)}
        wrong += self._node.union(changed)
        if self._forms.layers:
            wrong += self._derived.differing(self._loader_map, state())
        return wrong


def _tail(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")[-2:])


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
