"""Sparsity studies: how many bits of a policy differ between states k apart, and what sending them
costs.

`study` measures what is stored, a `CheckpointFolder` or a `StoredStream`; `SparsityMeter`
measures live. Both give one plain dict (JSON after ``json.dumps``), format "pulse.study.1"::

    format                  "pulse.study.1" source                  str: the folder, "STORE stream
    S", or "live" dtype                   str: the compute dtype of most elements as compared,
    safetensors' name ("BF16") dtypes                  {dtype: elements} as compared, after the cast
    parameters              int: elements of one state, tied tensors once dense_bytes
    int: bytes of one state after the cast (a full sync) states                  [str]: names of the
    states in order (file names, "version 12", "step 40") rows                    one object per k:
    k                       states apart; 1 is from each state to the next pairs
    pairs (t, t + k) compared elements                elements of one state changed
    float: mean changed elements per pair sparsity                mean over the pairs of the
    fraction of bitwise equal elements, END states compared (S_k) sparsity_min, _max      the
    extremes over the pairs untouched               mean share of elements that changed in none of
    the k steps between (<= sparsity): what a script that adds up per-step changes reports
    coded_pairs             pairs for which patches were built (a few, evenly spread); may be 0
    bytes                   float or null: mean bytes of a patch file, codec "auto", over the coded
    pairs bytes_per_changed       float or null: bytes of the patch files / changed elements, over
    the coded pairs bytes_per_changed_zstd  the same with codec "zstd" (the paper's layout)
    entropy_bound           bytes per changed element of the order-0 entropy given tensor and old
    exponent times_bound             bytes_per_changed / entropy_bound layers
    [{layer, k, elements, changed, sparsity, sparsity_min, sparsity_max}]; `layer` is one of
    ``result.LAYERS``, and only those that occur are listed kinds                   [{kind, k,
    elements, changed, sparsity}]: by dtype, the scales of quantised weights apart ("scales", by the
    ends of their names) tensors                 [{name, layer, dtype, shape, k, elements, changed,
    sparsity, sparsity_min, sparsity_max}] pairs                   [{k, old, new, changed,
    sparsity}]: every pair; old and new are indices into `states` exponents               pairs of
    the smallest k that were coded, by exponent of the old weight; one object per exponent e that
    occurs, for weights 2^e <= |w| < 2^(e+1) of dtype `dtype`; the highest stands for Inf and NaN:
    exponent                e (the lowest stands for subnormals and zero too) elements, changed,
    density threshold               an update |dw| below this is absorbed when the weight itself is
    kept in `dtype` (half a rounding step; |w| / 256 or less in BF16) predicted_lr
    density predicted for FP32 masters when every update is lr (null without lr): a master lies
    anywhere in its rounding interval, so |dw| / step of them cross its edge, at most 1
    predicted_10lr          the same when every update is 10 lr, Adam's bound at betas (.9, .999)
    history                 null for two states or fewer, and live unless asked for; else what is
    known of a step, from one state to the next, by the steps before it (elements of 1, 2 and 4
    bytes only): first                   the steps counted lead to the states from this one on: the
    second half steps, changed          how many, and all their changes ages
    [{from, to, share}]: the share of the changes whose element had last changed so many states
    before ("to" null: and more); octaves not_yet                 the share of those that had not
    changed since the first state within_8                the share of ages up to 8 coded_steps
    steps for which the rest was counted and patches were built (at most 8; live: the newest one at
    each call) position_bits, sign_bits,
    size_bits bits per change, order 0, without history; the module `recurrence` says of which
    classes position_bits_with_history, sign_bits_with_history, size_bits_with_history the same
    given what is known of the last change entropy_bound, entropy_bound_with_history bytes per
    change: the sums of the three bytes_per_changed_history, bytes_per_changed_auto bytes of whole
    patch files / changes over those steps; with "history" as by a publisher that numbers the
    states as versions from 0 lr                      float or null
    gradient_density        float or null: mean share of non-zero gradient entries (live only)
    gradients               [float or null]: the share at each state's step (live only, else empty)
    summary                 the three numbers, of k = 1 (or the smallest k): sparsity
    as in rows bytes_per_sync          float or null: bytes_per_changed * changed
    bandwidth_for_target    bit/s or null: the link that keeps utilisation at `target`
    (pulse_rl.plan) bandwidth_full          bit/s or null: the same for full syncs target
    0.9 step_seconds            assumed seconds of compute between syncs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._util import extra
from .run import CheckpointFolder, StoredStream, study

if TYPE_CHECKING:
    from .meter import SparsityMeter

__all__ = ["CheckpointFolder", "SparsityMeter", "StoredStream", "study"]


def __getattr__(name: str) -> Any:
    """`SparsityMeter` needs torch, so its module is imported when it is asked for."""
    if name == "SparsityMeter":
        with extra("torch"):
            from .meter import SparsityMeter

        return SparsityMeter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
