"""The result of a study: the blocks' records added up, for the model, its layer types and its
tensors, as the dict of format "pulse.study.1" (see `pulse_rl.study`).

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
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from ..codec import CODECS
from ..patch.blocks import Block, cut
from ..patch.header import BlockEntry, PatchHeader, all_of
from ..state.tensors import TensorSpec
from .plan import bandwidth_for
from .record import BlockRecord, ChangeCount, CodedBlock, Pair

SCALES = ("_scale_inv", "_scale", "_scale_2", "_scales", ".scales", ".scale")
"""How the names of scales end in checkpoints."""

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


_ROOTS = sha256(b"old").hexdigest(), sha256(b"new").hexdigest()
"""Stand for the roots of a pair in its patch headers, whose size they do not change."""


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

    def dtypes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for spec in self.specs:
            found[spec.dtype.name] = found.get(spec.dtype.name, 0) + spec.elements
        return found

    def layer_elements(self) -> npt.NDArray[np.int64]:
        result = np.zeros(len(LAYERS), np.int64)
        np.add.at(result, self._layer_index, [s.elements for s in self.specs])
        return result

    def add(self, record: BlockRecord) -> None:
        """Adds what a block's record has found since the last call, and empties it. Blocks must
        come in order."""
        self._count(record.block, record.counts)
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
            tensors.add(changed)
            layers.add(
                np.bincount(self._layer_index, weights=changed, minlength=len(LAYERS)).astype(
                    np.int64
                )
            )
            self.touched[pair.k] += touched
            sparsity = 1 - total / max(self.elements, 1)
            self.pairs.append(
                {
                    "k": pair.k,
                    "old": pair.new - pair.k,
                    "new": pair.new,
                    "changed": total,
                    "sparsity": sparsity,
                }
            )
        self._unfinished = {}

    def changed(self, pair: Pair) -> int:
        """Elements that change in the patch of a coded pair."""
        return sum(entry.changed for entry in self.coded[pair][CODECS[0]])

    def patch_bytes(self, pair: Pair, codec: str) -> int:
        """Bytes of the patch file of a coded pair."""
        header = PatchHeader(*_ROOTS, all_of(self.specs), tuple(self.coded[pair][codec]))
        return len(header.to_bytes()) + header.body_bytes

    def _count(self, block: Block, counts: Mapping[Pair, ChangeCount]) -> None:
        for pair, count in counts.items():
            changed, touched = self._unfinished.get(pair) or (
                np.zeros(len(self.specs), np.int64),
                0,
            )
            for segment, n in zip(block.segments, count.changed.tolist(), strict=True):
                changed[self._at[segment.spec.name]] += n
            self._unfinished[pair] = changed, touched + count.touched


FORMAT = "pulse.study.1"
TARGET = 0.9
STEP_SECONDS = 50.0
"""The paper's: with it U = T / (T + 8 S / B) gives its Figure 1."""


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
    ks = [k for k in tally.ks if tally.statistics[k][0].pairs]
    rows = [_row(tally, k) for k in ks]
    dtypes = tally.dtypes()
    dense_bytes = sum(s.nbytes for s in tally.specs)
    known = [g for g in gradients if g is not None]
    return {
        "format": FORMAT,
        "source": source,
        "dtype": max(dtypes, key=lambda name: dtypes[name]),
        "dtypes": dtypes,
        "parameters": tally.elements,
        "dense_bytes": dense_bytes,
        "states": list(states),
        "rows": rows,
        "layers": _layer_rows(tally, ks),
        "kinds": _kind_rows(tally, ks),
        "tensors": _tensor_rows(tally, ks),
        "pairs": tally.pairs,
        "gradient_density": sum(known) / len(known) if known else None,
        "gradients": list(gradients),
        "summary": _summary(rows, dense_bytes, step_seconds),
    }


def _row(tally: Tally, k: int) -> dict[str, Any]:
    whole, _, _ = tally.statistics[k]
    untouched = 1 - tally.touched[k] / whole.pairs / max(tally.elements, 1)
    row = {"k": k, "pairs": whole.pairs, **whole.row(0, tally.elements), "untouched": untouched}
    return row | _cost(tally, k)


def _cost(tally: Tally, k: int) -> dict[str, Any]:
    coded = [pair for pair in tally.coded if pair.k == k]
    changed = sum(tally.changed(pair) for pair in coded)
    if not changed:
        names = ("bytes", "bytes_per_changed", "bytes_per_changed_zstd")
        return {"coded_pairs": len(coded), **dict.fromkeys(names)}
    ours, zstd = (sum(tally.patch_bytes(pair, codec) for pair in coded) for codec in CODECS)
    return {
        "coded_pairs": len(coded),
        "bytes": ours / len(coded),
        "bytes_per_changed": ours / changed,
        "bytes_per_changed_zstd": zstd / changed,
    }


def _layer_rows(tally: Tally, ks: list[int]) -> list[dict[str, Any]]:
    elements = tally.layer_elements().tolist()
    return [
        {"layer": layer, "k": k, **tally.statistics[k][1].row(i, elements[i])}
        for k in ks
        for i, layer in enumerate(LAYERS)
        if layer in tally.layers
    ]


def kind_of(spec: TensorSpec) -> str:
    """What a tensor of a checkpoint holds: "scales" of a quantized weight, or elements of its
    dtype."""
    return "scales" if spec.name.endswith(SCALES) else spec.dtype.name


def _kind_rows(tally: Tally, ks: list[int]) -> list[dict[str, Any]]:
    kinds = [kind_of(spec) for spec in tally.specs]
    rows = []
    for k in ks:
        counted = tally.statistics[k][2]
        for kind in dict.fromkeys(kinds):
            of = [i for i, each in enumerate(kinds) if each == kind]
            elements, changed = (
                sum(tally.specs[i].elements for i in of),
                int(counted.total[of].sum()) / counted.pairs,
            )
            rows.append(
                {
                    "kind": kind,
                    "k": k,
                    "elements": elements,
                    "changed": changed,
                    "sparsity": 1 - changed / max(elements, 1),
                }
            )
    return rows


def _tensor_rows(tally: Tally, ks: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "name": spec.name,
            "layer": tally.layers[i],
            "dtype": spec.dtype.name,
            "shape": list(spec.shape),
            "k": k,
            **tally.statistics[k][2].row(i, spec.elements),
        }
        for k in ks
        for i, spec in enumerate(tally.specs)
    ]


def _summary(rows: list[dict[str, Any]], dense_bytes: int, step_seconds: float) -> dict[str, Any]:
    first = rows[0] if rows else None
    nbytes = None
    if first and first["coded_pairs"]:
        nbytes = (first["bytes_per_changed"] or 0.0) * first["changed"]
    return {
        "sparsity": first["sparsity"] if first else None,
        "bytes_per_sync": nbytes,
        "bandwidth_for_target": None
        if nbytes is None
        else bandwidth_for(nbytes, step_seconds, TARGET),
        "bandwidth_full": bandwidth_for(dense_bytes, step_seconds, TARGET),
        "target": TARGET,
        "step_seconds": step_seconds,
    }
