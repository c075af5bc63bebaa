"""What a study counts, block by block: changed elements against the states k before, and the cost
of some patches; added up for the model, its layer types and its tensors, as the dict of format
"pulse.study.1" (see `pulse_rl.study`).

The layer type of a tensor follows from its name. The first rule that fits decides. A name's parts
are what stands between its dots, in lower case.

==========  ========================================================================================
biases      the last part is ``bias`` or ends with ``_bias``, whatever layer it belongs to
norms       a part contains ``norm``, or is ``ln`` with or without a suffix (``ln_1``, ``ln_f``)
head        a part is ``lm_head``, ``embed_out``, ``score``, ``classifier``, ``v_head``,
            ``value_head`` or ``head``
embeddings  a part contains ``embed``, or is ``wte``, ``wpe``, ``shared``
attention   a part contains ``attn`` or ``attention``, or is one of q/k/v/o/qkv_proj, ``query``,
            ``key``, ``value``
mlp         a part contains ``mlp``, ``ffn``, ``feed_forward``, ``intermediate`` or ``expert``, or
            is one of
            gate/up/down/gate_up_proj, ``fc1``, ``fc2``, ``w1``, ``w2``, ``w3``, or ``output``
            (BERT's second matrix)
others      everything else
==========  ========================================================================================

A head that is tied to the embeddings is stored once, as embeddings.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import codec as codecs
from ..codec import CODECS, Changes
from ..patch.blocks import Block, cut
from ..patch.build import entry_of
from ..patch.header import BlockEntry, PatchHeader, all_of
from ..state import bits
from ..state.bits import UIntArray
from ..state.tensors import TensorSpec
from .plan import bandwidth_for

#: How the names of scales end in checkpoints.
SCALES = ("_scale_inv", "_scale", "_scale_2", "_scales", ".scales", ".scale")

LAYERS = ("embeddings", "attention", "mlp", "norms", "head", "biases", "others")

_RULES = tuple(
    (layer, re.compile(rule))
    for layer, rule in (
        ("biases", r"(.*\.)?(bias|[^.]*_bias)"),
        ("norms", r"(.*\.)?([^.]*norm[^.]*|ln(_[^.]*)?)(\..*)?"),
        ("head", r"(.*\.)?(lm_head|embed_out|score|classifier|v_head|value_head|head)(\..*)?"),
        ("embeddings", r"(.*\.)?([^.]*embed[^.]*|wte|wpe|shared)(\..*)?"),
        (
            "attention",
            r"(.*\.)?([^.]*(attn|attention)[^.]*|(q|k|v|o|qkv)_proj|query|key|value)(\..*)?",
        ),
        (
            "mlp",
            r"(.*\.)?([^.]*(mlp|ffn|feed_forward|intermediate|expert)[^.]*|(gate|up|down|gate_up)_proj|fc1|fc2|w[123]|output)(\..*)?",
        ),
    )
)


def layer_of(name: str) -> str:
    """The layer type of the tensor called ``name``, one of ``LAYERS``."""
    lower = name.lower()
    return next((layer for layer, rule in _RULES if rule.fullmatch(lower)), "others")


class Pair(NamedTuple):
    """The states ``new - k`` and ``new``, numbered from 0."""

    k: int
    new: int


class ChangeCount(NamedTuple):
    """Changed elements by segment of the block, and elements of the block that changed in any step
    between."""

    changed: npt.NDArray[np.int64]
    touched: int


#: A block in the patch of one pair, by codec.
CodedBlock = dict[str, BlockEntry]


class BlockRecord:
    """Compares the states of a block one after another; ``coded`` are the pairs whose patches are
    built.

    Of at most ``max(ks)`` states before the newest it keeps what changed: a position and a value a
    change, or one copy of the block where that is less; so the whole takes at most ``max(ks) + 1``
    copies.
    """

    def __init__(self, block: Block, ks: Collection[int], coded: Collection[Pair] = ()) -> None:
        self.block = block
        self.counts: dict[Pair, ChangeCount] = {}
        self.coded_blocks: dict[Pair, CodedBlock] = {}
        self._ks = frozenset(ks)
        self._pairs_to_code = frozenset(coded)
        self._ends = np.cumsum([s.stop - s.start for s in block.segments])
        self._states = 0
        self._newest = np.empty(0, block.dtype.uint)
        self._undo: deque[Changes | UIntArray] = deque(maxlen=max(ks))

    @property
    def nbytes(self) -> int:
        """Memory that the kept states take."""
        return self._newest.nbytes + sum(
            u.positions.nbytes + u.values.nbytes if isinstance(u, Changes) else u.nbytes
            for u in self._undo
        )

    def add(self, elements: UIntArray) -> None:
        """Compare the block in the next state; ``elements`` are copied."""
        if self._states == 0:
            self._newest = elements.copy()
        else:
            self._push(elements)
        for k, earlier, touched in self._earlier():
            pair = Pair(k, self._states)
            positions = bits.differing(earlier, self._newest)
            changed = np.diff(np.searchsorted(positions, self._ends), prepend=0).astype(np.int64)
            self.counts[pair] = ChangeCount(changed, int(np.count_nonzero(touched)))
            if pair in self._pairs_to_code:
                self.coded_blocks[pair] = self._code(earlier)
        self._states += 1

    def code_newest(self) -> dict[Pair, CodedBlock]:
        """The coded block of each pair that ends in the newest state."""
        newest = self._states - 1
        return {Pair(k, newest): self._code(earlier) for k, earlier, _ in self._earlier()}

    def _push(self, elements: UIntArray) -> None:
        positions = bits.differing(self._newest, elements)
        if positions.size * (positions.itemsize + elements.itemsize) < elements.nbytes:
            self._undo.append(Changes(positions, bits.take(self._newest, positions)))
            bits.put(self._newest, positions, bits.take(elements, positions))
        else:
            self._undo.append(self._newest)
            self._newest = elements.copy()

    def _earlier(self) -> Iterator[tuple[int, UIntArray, npt.NDArray[np.bool_]]]:
        """(k, the block k states before, where it changed at least once since), the latest state
        first. Views, valid until the next one is asked for."""
        now = self._newest.copy()
        touched = np.zeros(now.size, np.bool_)
        for k, undo in enumerate(reversed(self._undo), 1):
            if isinstance(undo, Changes):
                bits.put(now, undo.positions, undo.values)
                touched[undo.positions] = True
            else:
                touched |= undo != now
                now = undo.copy()
            if k in self._ks:
                yield k, now, touched

    def _code(self, old: UIntArray) -> CodedBlock:
        layout = self.block.layout
        return {
            codec: entry_of(codecs.encode_block(old, self._newest, layout, codec=codec))
            for codec in CODECS
        }


class CountStatistics:
    """Mean and extremes of counts [n] over pairs."""

    def __init__(self, n: int) -> None:
        self.pairs = 0
        self.total = np.zeros(n, np.int64)
        self.min = np.full(n, np.iinfo(np.int64).max)
        self.max = np.zeros(n, np.int64)

    def add(self, counts: npt.NDArray[np.int64]) -> None:
        self.pairs += 1
        self.total += counts
        np.minimum(self.min, counts, out=self.min)
        np.maximum(self.max, counts, out=self.max)

    def row(self, i: int, elements: int) -> dict[str, Any]:
        """The fields that all rows of a study share; of a tensor without elements nothing ever
        changes."""
        whole = max(elements, 1)
        return {
            "elements": elements,
            "changed": int(self.total[i]) / self.pairs,
            "sparsity": 1 - int(self.total[i]) / self.pairs / whole,
            "sparsity_min": 1 - int(self.max[i]) / whole,
            "sparsity_max": 1 - int(self.min[i]) / whole,
        }


class Tally:
    """The sums of one study. ``specs`` are those after the cast, ``ks`` ascending."""

    def __init__(self, specs: tuple[TensorSpec, ...], ks: Sequence[int]) -> None:
        self.specs = specs
        self.ks = tuple(ks)
        self.blocks = cut(specs)
        self.elements = sum(s.elements for s in specs)
        self.layers = [layer_of(s.name) for s in specs]
        self.pairs: list[dict[str, Any]] = []
        self.coded: dict[Pair, dict[str, list[BlockEntry]]] = {}
        self.statistics = {
            k: (CountStatistics(1), CountStatistics(len(LAYERS)), CountStatistics(len(specs)))
            for k in self.ks
        }
        self.touched = dict.fromkeys(self.ks, 0)
        self._at = {s.name: i for i, s in enumerate(specs)}
        self._layer_index = np.array([LAYERS.index(layer) for layer in self.layers], np.int64)
        self._unfinished: dict[Pair, tuple[npt.NDArray[np.int64], int]] = {}

    def by_layer(self, counts: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The sums, for each of ``LAYERS``, of what there is of each tensor."""
        sums = np.bincount(self._layer_index, weights=counts, minlength=len(LAYERS))
        return sums.astype(np.int64)

    def add(self, record: BlockRecord) -> None:
        """Adds what a block's record has found since the last call, and empties it. Blocks must
        come in order."""
        nothing = np.zeros(len(self.specs), np.int64)
        for pair, count in record.counts.items():
            changed, touched = self._unfinished.get(pair) or (nothing.copy(), 0)
            for segment, n in zip(record.block.segments, count.changed.tolist(), strict=True):
                changed[self._at[segment.spec.name]] += n
            self._unfinished[pair] = changed, touched + count.touched
        self.add_coded_blocks(record.coded_blocks)
        record.counts, record.coded_blocks = {}, {}

    def add_coded_blocks(self, coded_blocks: Mapping[Pair, CodedBlock]) -> None:
        for pair, coded_block in coded_blocks.items():
            entries = self.coded.setdefault(pair, {name: [] for name in CODECS})
            for name, entry in coded_block.items():
                entries[name].append(entry)

    def finish_pairs(self) -> None:
        """Adds the pairs to the statistics; call it when all blocks of the states so far were
        added."""
        for pair in sorted(self._unfinished, key=lambda p: (p.new, p.k)):
            changed, touched = self._unfinished[pair]
            total = int(changed.sum())
            whole, layers, tensors = self.statistics[pair.k]
            whole.add(np.array([total]))
            layers.add(self.by_layer(changed))
            tensors.add(changed)
            self.touched[pair.k] += touched
            of = {"k": pair.k, "old": pair.new - pair.k, "new": pair.new, "changed": total}
            self.pairs.append(of | {"sparsity": 1 - total / max(self.elements, 1)})
        self._unfinished = {}

    def cost(self, k: int) -> dict[str, Any]:
        """What the patches of the coded pairs take."""
        coded = [entries for pair, entries in self.coded.items() if pair.k == k]
        changed = sum(entry.changed for entries in coded for entry in entries[CODECS[0]])
        if not changed:
            names = ("bytes", "bytes_per_changed", "bytes_per_changed_zstd")
            return {"coded_pairs": len(coded), **dict.fromkeys(names)}
        nbytes = []
        for codec in CODECS:
            headers = [
                PatchHeader(*_ROOTS, all_of(self.specs), tuple(entries[codec])) for entries in coded
            ]
            nbytes.append(sum(len(header.to_bytes()) + header.body_bytes for header in headers))
        ours, zstd = nbytes
        return {
            "coded_pairs": len(coded),
            "bytes": ours / len(coded),
            "bytes_per_changed": ours / changed,
            "bytes_per_changed_zstd": zstd / changed,
        }


# Stand for the roots of a pair in its patch headers, whose size they do not change.
_ROOTS = sha256(b"old").hexdigest(), sha256(b"new").hexdigest()

FORMAT = "pulse.study.1"
TARGET = 0.9
#: The paper's: with it U = T / (T + 8 S / B) gives its Figure 1.
STEP_SECONDS = 50.0


def kind_of(spec: TensorSpec) -> str:
    """What a tensor of a checkpoint holds: "scales" of a quantized weight, or elements of its
    dtype."""
    return "scales" if spec.name.endswith(SCALES) else spec.dtype.name


def study_dict(
    tally: Tally,
    *,
    source: str,
    states: Sequence[str],
    step_seconds: float = STEP_SECONDS,
    gradients: Sequence[float | None] = (),
) -> dict[str, Any]:
    """The study as a dict of plain values; values of k for which no pair was compared have no
    rows."""
    rows: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    kinds: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    of_layers = tally.by_layer([s.elements for s in tally.specs]).tolist()
    kind_names = [kind_of(spec) for spec in tally.specs]
    # 1. The rows of each k: of the model, its layer types, its kinds of tensors, its tensors.
    for k in tally.ks:
        whole, by_layer, by_tensor = tally.statistics[k]
        if not whole.pairs:
            continue
        untouched = 1 - tally.touched[k] / whole.pairs / max(tally.elements, 1)
        row = {"k": k, "pairs": whole.pairs, **whole.row(0, tally.elements), "untouched": untouched}
        rows.append(row | tally.cost(k))
        for i, layer in enumerate(LAYERS):
            if layer in tally.layers:
                layers.append({"layer": layer, "k": k, **by_layer.row(i, of_layers[i])})
        for kind in dict.fromkeys(kind_names):
            of = [i for i, each in enumerate(kind_names) if each == kind]
            elements = sum(tally.specs[i].elements for i in of)
            changed = int(by_tensor.total[of].sum()) / by_tensor.pairs
            row = {"kind": kind, "k": k, "elements": elements, "changed": changed}
            kinds.append(row | {"sparsity": 1 - changed / max(elements, 1)})
        for i, spec in enumerate(tally.specs):
            row = {"name": spec.name, "layer": tally.layers[i], "dtype": spec.dtype.name}
            row |= {"shape": list(spec.shape), "k": k}
            tensors.append(row | by_tensor.row(i, spec.elements))
    # 2. The three numbers, of the smallest k.
    dense_bytes = sum(s.nbytes for s in tally.specs)
    first = rows[0] if rows else None
    nbytes = needed = None
    if first and first["coded_pairs"]:
        nbytes = (first["bytes_per_changed"] or 0.0) * first["changed"]
        needed = bandwidth_for(nbytes, step_seconds, TARGET)
    dtypes = Counter[str]()
    for spec in tally.specs:
        dtypes[spec.dtype.name] += spec.elements
    known = [g for g in gradients if g is not None]
    return {
        "format": FORMAT,
        "source": source,
        "dtype": dtypes.most_common(1)[0][0],
        "dtypes": dict(dtypes),
        "parameters": tally.elements,
        "dense_bytes": dense_bytes,
        "states": list(states),
        "rows": rows,
        "layers": layers,
        "kinds": kinds,
        "tensors": tensors,
        "pairs": tally.pairs,
        "gradient_density": sum(known) / len(known) if known else None,
        "gradients": list(gradients),
        "summary": {
            "sparsity": first["sparsity"] if first else None,
            "bytes_per_sync": nbytes,
            "bandwidth_for_target": needed,
            "bandwidth_full": bandwidth_for(dense_bytes, step_seconds, TARGET),
            "target": TARGET,
            "step_seconds": step_seconds,
        },
    }
