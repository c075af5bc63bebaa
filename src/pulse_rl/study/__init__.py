"""Sparsity studies: how many bits of a policy differ between states k apart, and what sending them
costs.

`study` measures what is stored, a folder of checkpoints or a stream; `SparsityMeter` measures live.
Both give one plain dict (JSON after ``json.dumps``), format "pulse.study.1"::

    format                  "pulse.study.1"
    source                  str: the folder, "STORE stream S", or "live"
    dtype                   str: the compute dtype of most elements as compared, safetensors' name
                            ("BF16")
    dtypes                  {dtype: elements} as compared, after the cast
    parameters              int: elements of one state, tied tensors once
    dense_bytes             int: bytes of one state after the cast (a full sync)
    states                  [str]: names of the states in order (file names, "version 12", "step
                            40")
    rows                    one object per k:
      k                       states apart; 1 is from each state to the next
      pairs                   pairs (t, t + k) compared
      elements                elements of one state
      changed                 float: mean changed elements per pair
      sparsity                mean over the pairs of the fraction of bitwise equal elements, END
                              states compared (S_k)
      sparsity_min, _max      the extremes over the pairs
      untouched               mean share of elements that changed in none of the k steps between (<=
                              sparsity): what a
                              script that adds up per-step changes reports
      coded_pairs             pairs for which patches were built (a few, evenly spread); may be 0
      bytes                   float or null: mean bytes of a patch file, codec "auto", over the
                              coded pairs
      bytes_per_changed       float or null: bytes of the patch files / changed elements, over the
                              coded pairs
      bytes_per_changed_zstd  the same with codec "zstd" (the paper's layout)
    layers                  [{layer, k, elements, changed, sparsity, sparsity_min, sparsity_max}];
                            `layer` is one of
                            ``tally.LAYERS``, and only those that occur are listed
    kinds                   [{kind, k, elements, changed, sparsity}]: by dtype, the scales of
                            quantized weights apart
                            ("scales", by the ends of their names)
    tensors                 [{name, layer, dtype, shape, k, elements, changed, sparsity,
                            sparsity_min, sparsity_max}]
    pairs                   [{k, old, new, changed, sparsity}]: every pair; old and new are indices
                            into `states`
    gradient_density        float or null: mean share of non-zero gradient entries (live only)
    gradients               [float or null]: the share at each state's step (live only, else empty)
    summary                 the three numbers, of k = 1 (or the smallest k):
      sparsity                as in rows
      bytes_per_sync          float or null: bytes_per_changed * changed
      bandwidth_for_target    bit/s or null: the link that keeps utilization at `target`
                              (``pulse plan``)
      bandwidth_full          bit/s or null: the same for full syncs
      target                  0.9
      step_seconds            assumed seconds of compute between syncs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._util import extra
from .run import study

if TYPE_CHECKING:
    from .meter import SparsityMeter

__all__ = ["SparsityMeter", "study"]


def __getattr__(name: str) -> Any:
    """`SparsityMeter` needs torch, so its module is imported when it is asked for."""
    if name == "SparsityMeter":
        with extra("torch"):
            from .meter import SparsityMeter

        return SparsityMeter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
