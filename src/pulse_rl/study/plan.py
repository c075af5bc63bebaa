"""The cost of one sync as arithmetic on a `Scenario`. Symbols and units:

==========  ========================================================================================
N           parameters; ``b`` bytes each (BF16: 2)
d           density, changed / all elements; ``C = d N`` changes
T           seconds that a step computes
B, B_up     bit/s of a worker's link to the store, and of the trainer's
k           workers that load over one link; 1: each has its own, and they load side by side
c           cores, as many at the publisher as at a worker
R, R_up     seconds of a round trip to the store, from a worker and from the trainer
p           share of the packets that a link loses
==========  ========================================================================================

**Bytes.** ``h(d) = -log2 d - (1/d - 1) log2(1 - d)`` bits say where one change is if all elements
are alike::

    full      S = b N
    zstd      S = min(b N, C (1.25 + 0.17 h) + H)                    the paper's codec
    auto      S = min(b N, C (2.4 + 0.52 h + 5 d^2) / 8 + H)         ours, without history
    history   S = min(b N, 0.95 C (2.4 + 0.52 h + 5 d^2) / 8 + H)    ours, by what changed in the
              last versions
    H         = 1000 + 50 blocks,  blocks = ceil(N / 2^22)

S is `sync_bytes`.

Our codec knows the old exponent, so a place costs about half of ``h``; 2.4 bits are sign and size
of a change, and where most weights change the changes are large. Fitted to FP32-master runs between
0.1% and 80% density: within 5% on recorded reinforcement learning, within 10% on synthetic states.
Pure BF16 weights need up to 1.7 times less.

History is assumed to run behind FP32 masters as well, where it saves 5% of that and takes a tenth
more time to publish and to sync, at 0.3% and 0.7% density. With pure BF16 weights it saves 42 to
45% for less time: give its measured bytes in ``bytes_per_changed``. Folds need no history and cost
what they do without it.

**Seconds**, one after another; ``p = min(c, blocks)`` cores can share a patch, ``q = min(c,
shards)`` an anchor, whose shards are of 2^27 bytes. Costs are in nanoseconds of one core (`Costs`;
SHA-256 takes ``s = 0.5`` a byte)::

    encode    (e0 N + e1 C) / p        diff, code, and decode again to prove it; nothing for full
    hash      s b N / p                full: b N (s / c + 1.85 / q), an anchor is hashed as a file,
                                       too
    upload    transfer(S, B_up, R_up) + 5 R_up
    download  transfer(k S, B, R) + 3 R
    verify    s b N / p                full: b N (s / c + 0.75 / q)
    apply     (a0 N + a1 C) / p        decode and scatter; nothing for full

    sync_seconds = the sum

**A transfer** of S bytes takes n connections, one for each 4 MiB and at most 8, as object stores
are read, of ``m = S / (1460 n)`` segments each. Of these ``f = (1 - (1 - p)^m) / p`` are expected
before one is lost; all, where p is 0. They come by slow start, ten in the first round trip and
twice as many in each of the next ones, in windows up to the connection's share of the link, ``W = B
R / (8 1460 n)`` segments::

    transfer(S, B, R) = R log2(1 + min(f, W) / 10) + 8 (1460 n f) / B + what comes after a loss

After each loss a window is 0.7 of what it was and grows by 0.53 a round trip, up to W, as those of
CUBIC where it is as fair as Reno; ``1 / p`` segments later the next one is lost. The last of
several connections takes a tenth longer than the mean. BBR minds losses less. Measured on a way of
80 ms: docs/evidence.md.

**Utilization**, the share of a step in which the GPU computes::

    utilization        = T / (T + 8 S k / B)                         the paper's: only the transfer
                       blocks
    worker_utilization = T / (T + download + verify + apply)         a worker that syncs before each
    of its steps

The second is what such a worker measures while the trainer publishes beside it. Where nothing
overlaps, because the trainer waits for the workers as well, it is ``T / (T + sync_seconds)``. A
worker that fetches while it generates is above all of these, at the price of older weights. The
paper's Figure 1 (PULSE, arXiv 2602.03839) follows from the first with T of about 50 s. Solved for
B, it gives ``bandwidth_for_target``::

    B = 8 S k u / ((1 - u) T)

**Where a full sync wins**: its `sync_seconds` are less than those of a patch without history. The
density above which they are is found by bisection; the bandwidth above which they are, B_up growing
with B, is where the bytes saved take as long as the coding::

    B_full = B 8 (S_full - S_auto) (1 / B_up + k / B) / (coding_auto - coding_full)

with coding = encode + hash + verify + apply; it does not exist while a patch costs less coding than
an anchor."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .._util.settings import NUMBER, checked_number, matched, with_prefix
from ..errors import InputError
from ..store.base import CONNECTIONS, PIECE_BYTES
from ..stream.anchor import DEFAULT_SHARD_BYTES

#: A full sync, patches by the paper's codec, patches by ours, without and with history.
METHODS = ("full", "zstd", "auto", "history")

PHASES = ("encode", "hash", "upload", "download", "verify", "apply")
CODING = ("encode", "hash", "verify", "apply")

_NANO = 1e-9
_BLOCK_ELEMENTS = 1 << 22
_FILE_BYTES, _BYTES_A_BLOCK = 1000, 50
_PUBLISH_REQUESTS, SYNC_REQUESTS = 5, 3
_SEGMENT_BYTES, _FIRST_WINDOW, _AFTER_LOSS, _GROWTH = 1460, 10, 0.7, 0.53
_LAST = 1.1  # how much later than the mean the last of several connections is
_LOSSES = 100  # then windows have long been as large as they stay
_WITH_HISTORY = 0.95
_BISECTIONS = 60
_MIN, _MAX = 1e-9, 1e18


@dataclass(frozen=True, slots=True)
class Costs:
    """Nanoseconds of one core: per element (`encode`, `apply`) and per change on top of it."""

    encode: float
    encode_change: float
    apply: float
    apply_change: float


#: On an idle core of an AMD EPYC (Zen 5); "history" behind FP32 masters, where most is remembered:
#: what docs/benchmarks.md measures beside what "auto" takes without it, on top of that.
COSTS = {
    "full": Costs(0, 0, 0, 0),
    "zstd": Costs(0.5, 20, 0.25, 16),
    "auto": Costs(0.8, 98, 0.4, 64),
    "history": Costs(1.0, 110, 0.54, 70),
}

HASH_BYTE = 0.5
#: Nanoseconds a byte of one core: SHA-256, and what an anchor takes on top of it, one core a shard.
ANCHOR_HASH_BYTE, ANCHOR_VERIFY_BYTE = 1.85, 0.75


@dataclass(frozen=True, slots=True)
class Scenario:
    """The inputs of a plan; see the module for symbols. Bandwidths are in bit/s, times in seconds.

    The model has ``params`` parameters of ``param_bytes`` bytes each, of which the fraction
    ``density`` changes in a step of ``step_seconds``. Each worker has a link of ``bandwidth``, or
    ``sharers`` of them share one; there are ``cores`` cores at either end, and a request takes
    ``round_trip_seconds``. ``upload_bandwidth`` and ``upload_round_trip_seconds`` None: the
    trainer's link is as a worker's. Each link loses the share ``loss`` of its packets.
    ``bytes_per_changed``, measured by method at this density, replaces the formula where given.
    Raises InputError for impossible values.
    """

    params: int
    density: float
    step_seconds: float
    bandwidth: float
    upload_bandwidth: float | None = None
    sharers: int = 1
    cores: int = 8
    round_trip_seconds: float = 0.0
    upload_round_trip_seconds: float | None = None
    loss: float = 0.0
    param_bytes: float = 2.0
    bytes_per_changed: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("params", "sharers", "cores", "step_seconds", "bandwidth", "param_bytes"):
            checked_number(name, getattr(self, name), minimum=_MIN, maximum=_MAX)
        if self.upload_bandwidth is not None:
            checked_number("upload_bandwidth", self.upload_bandwidth, minimum=_MIN, maximum=_MAX)
        checked_number("round_trip_seconds", self.round_trip_seconds, maximum=_MAX)
        upload_trip = self.upload_round_trip_seconds or 0
        checked_number("upload_round_trip_seconds", upload_trip, maximum=_MAX)
        checked_number("loss", self.loss, maximum=0.5)
        checked_number("density", self.density, maximum=1)
        for name, value in self.bytes_per_changed.items():
            checked_number(f"bytes_per_changed of {name}", value, maximum=_MAX)


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """One method's prediction. ``sync_bytes`` travel in a sync; ``phases`` maps each of ``PHASES``
    to seconds; ``utilization`` and ``worker_utilization`` are shares of a step;
    ``bandwidth_for_target`` is in bit/s."""

    sync_bytes: int
    phases: dict[str, float]
    utilization: float
    worker_utilization: float
    bandwidth_for_target: float

    @property
    def sync_seconds(self) -> float:
        """From the trainer's state to the worker's: the sum of all phases."""
        return sum(self.phases.values())


def make_plan(scenario: Scenario, *, target: float = 0.9) -> dict[str, MethodPlan]:
    """Predicts one sync of ``scenario`` by each of ``METHODS``. ``target`` is the utilization that
    `MethodPlan.bandwidth_for_target` aims at. Raises InputError unless it is above 0 and below
    1."""
    if not 0 < checked_number("target", target) < 1:
        raise InputError(f"target must be above 0 and below 1, not {target}")
    return {name: _predict(scenario, name, target) for name in METHODS}


def full_wins(scenario: Scenario) -> tuple[float | None, float | None]:
    """(density, bandwidth in bit/s) above which, all else equal, a full sync takes less time than a
    patch. None: it never does."""
    full, ours = _predict(scenario, "full"), _predict(scenario, "auto")
    # From the trainer through the store to the worker that has it last.
    upload = scenario.upload_bandwidth or scenario.bandwidth
    seconds_a_bit = 1 / upload + scenario.sharers / scenario.bandwidth
    saved_seconds = 8 * (full.sync_bytes - ours.sync_bytes) * seconds_a_bit
    extra_coding = sum(ours.phases[name] - full.phases[name] for name in CODING)
    bandwidth = scenario.bandwidth * saved_seconds / extra_coding if extra_coding > 0 else None

    def wins(density: float) -> bool:
        other = replace(scenario, density=density, bytes_per_changed={})
        return _predict(other, "auto").sync_seconds > full.sync_seconds

    if not wins(1.0):
        return None, bandwidth
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high, bandwidth


def sync_bytes(method: str, params: int, density: float, param_bytes: float = 2.0) -> float:
    """Bytes of one sync by ``method``, S: ``params`` parameters of ``param_bytes`` bytes, of which
    the fraction ``density`` changed. A patch is never larger than a full sync.
    """
    full = params * param_bytes
    if method == "full":
        return full
    where = _position_bits(density)
    ours = (2.4 + 0.52 * where + 5 * density**2) / 8
    per_change = {"zstd": 1.25 + 0.17 * where, "auto": ours, "history": _WITH_HISTORY * ours}
    changes = params * density * per_change[method]
    return min(full, changes + _FILE_BYTES + _BYTES_A_BLOCK * _blocks(params))


def utilization(nbytes: float, step_seconds: float, bandwidth: float) -> float:
    """The paper's ``T / (T + 8 S / B)``: ``nbytes`` over ``bandwidth`` bit/s after each
    ``step_seconds`` of work."""
    return step_seconds / (step_seconds + 8 * nbytes / bandwidth)


def bandwidth_for(nbytes: float, step_seconds: float, target: float) -> float:
    """The bandwidth in bit/s at which `utilization` is ``target``, for ``nbytes`` and
    ``step_seconds``."""
    return 8 * nbytes * target / ((1 - target) * step_seconds)


def transfer_seconds(nbytes: float, bandwidth: float, trip: float, loss: float) -> float:
    """Seconds of so many bytes over a link of ``bandwidth`` bit/s with round trips of ``trip``
    seconds, which loses the share ``loss`` of its packets."""
    connections = min(max(nbytes // PIECE_BYTES, 1), CONNECTIONS)
    left = nbytes / connections / _SEGMENT_BYTES
    share = bandwidth / connections / 8 / _SEGMENT_BYTES  # segments a second of each connection
    lossy = loss > 0 and trip > 0
    early = -math.expm1(left * math.log1p(-loss)) / loss if lossy else left
    window = min(early, share * trip)
    seconds, left = trip * math.log2(1 + window / _FIRST_WINDOW) + early / share, left - early
    last = _LAST if connections > 1 else 1.0
    for _ in range(_LOSSES if lossy else 0):
        sent = min(1 / loss, left)
        window = max(_AFTER_LOSS * window, 1.0)
        grown = window + _GROWTH * sent / window
        took = last * sent / min(share, (window + grown) / 2 / trip)
        window, seconds, left = min(grown, share * trip), seconds + took, left - sent
        if left <= 0:
            return seconds
    return seconds + (left * loss * took if lossy else 0.0)


def _position_bits(density: float) -> float:
    """h(d), bits per change; 0 at the ends, where there is nothing to encode."""
    if not 0 < density < 1:
        return 0.0
    return -math.log2(density) - (1 / density - 1) * math.log1p(-density) / math.log(2)


def _blocks(params: int) -> int:
    return -(-params // _BLOCK_ELEMENTS)


def _phases(scenario: Scenario, method: str, nbytes: float) -> dict[str, float]:
    n, changes = scenario.params, scenario.params * scenario.density
    state_bytes = scenario.param_bytes * n
    tree = HASH_BYTE * state_bytes
    if method == "full":
        at_once = min(scenario.cores, math.ceil(nbytes / DEFAULT_SHARD_BYTES))
        hashed = tree / scenario.cores + ANCHOR_HASH_BYTE * state_bytes / at_once
        verified = tree / scenario.cores + ANCHOR_VERIFY_BYTE * state_bytes / at_once
    else:
        at_once = min(scenario.cores, _blocks(n))
        hashed = verified = tree / at_once
    costs = COSTS[method]
    trip, loss = scenario.round_trip_seconds, scenario.loss
    upload_trip = scenario.upload_round_trip_seconds
    if upload_trip is None:
        upload_trip = trip
    uploaded = transfer_seconds(
        nbytes, scenario.upload_bandwidth or scenario.bandwidth, upload_trip, loss
    )
    loaded = transfer_seconds(nbytes * scenario.sharers, scenario.bandwidth, trip, loss)
    return {
        "encode": _NANO * (costs.encode * n + costs.encode_change * changes) / at_once,
        "hash": _NANO * hashed,
        "upload": uploaded + _PUBLISH_REQUESTS * upload_trip,
        "download": loaded + SYNC_REQUESTS * trip,
        "verify": _NANO * verified,
        "apply": _NANO * (costs.apply * n + costs.apply_change * changes) / at_once,
    }


def _predict(scenario: Scenario, method: str, target: float = 0.9) -> MethodPlan:
    nbytes = sync_bytes(method, scenario.params, scenario.density, scenario.param_bytes)
    if method in scenario.bytes_per_changed:
        measured = scenario.bytes_per_changed[method] * scenario.params * scenario.density
        nbytes = min(scenario.params * scenario.param_bytes, measured)
    phases = _phases(scenario, method, nbytes)
    step, loaded = scenario.step_seconds, nbytes * scenario.sharers
    return MethodPlan(
        sync_bytes=round(nbytes),
        phases=phases,
        utilization=utilization(loaded, step, scenario.bandwidth),
        worker_utilization=step / (step + phases["download"] + phases["verify"] + phases["apply"]),
        bandwidth_for_target=bandwidth_for(loaded, step, target),
    )


_KEYS = {"auto": "bytes_per_changed", "zstd": "bytes_per_changed_zstd"}


def from_study(study: Any) -> dict[str, Any]:
    """The fields of a `Scenario` that a study (the JSON object of ``pulse study``) settles:
    ``params``, ``density``, ``param_bytes`` and ``bytes_per_changed`` of its row with the smallest
    k. Raises InputError if ``study`` is not a study.
    """
    try:
        row = min(study["rows"], key=lambda row: float(row["k"]))
        params = int(study["parameters"])
        found = {name: row.get(key) for name, key in _KEYS.items()}
        return {
            "params": params,
            "density": 1 - float(row["sparsity"]),
            "param_bytes": float(study["dense_bytes"]) / params,
            "bytes_per_changed": {
                n: float(value) for n, value in found.items() if value is not None
            },
        }
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise InputError(
            f"not a study: {error!r}", hint="Give the output of `pulse study --json`."
        ) from None


class _Quantized(NamedTuple):
    """A format beside BF16: bytes a weight, codes that change for each BF16 weight that does, and
    bytes a weight that a step's scales take."""

    param_bytes: float
    codes: float
    scales: float


#: As one run with FP32 masters had it, between its two learning rates (docs/quantized.md).
QUANTIZED = {
    "fp8_block": _Quantized(1 + 4 / 128**2, 0.079, 0.9 / 128**2),
    "mxfp8": _Quantized(1 + 1 / 32, 0.085, 0),
    "mxfp4": _Quantized(1 / 2 + 1 / 32, 0.004, 0),
    "nvfp4": _Quantized(1 / 2 + 1 / 16, 0.0056, 1e-5),
}


def quantized_inputs(params: int, density: float, name: str) -> dict[str, Any]:
    """The same fields of ``params`` weights in the format ``name`` where a step changes ``density``
    of them in BF16. History saves nothing. Raises InputError."""
    if name not in QUANTIZED:
        raise InputError(f"unknown format {name!r}", hint=f"Choose one of: {', '.join(QUANTIZED)}.")
    of = QUANTIZED[name]
    codes = density * of.codes
    nbytes = sync_bytes("auto", params, codes, of.param_bytes) + of.scales * params
    each = nbytes / max(params * codes, 1)
    return {
        "params": params,
        "density": codes,
        "param_bytes": of.param_bytes,
        "bytes_per_changed": {"auto": each, "history": each},
    }


# -- units, as people write and read them: 0.2Gbit, 10MB/s, 7B, 0.86%

_BANDWIDTH = re.compile(NUMBER + r"\s*([kMGT]?)(bits?|b|B)(?:ps|/s)?", re.ASCII)
_COUNT = re.compile(NUMBER + r"\s*([kKMBTG]?)", re.ASCII)
_SHARE = re.compile(NUMBER + r"\s*(%?)", re.ASCII)
_FACTORS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def parse_bandwidth(text: str) -> float:
    """Bit/s from ``text``: a number, a decimal prefix (k, M, G, T), and ``bit`` (``bits``, ``b``)
    or ``B`` for bytes, with or without ``/s`` or ``ps``. Raises InputError."""
    match = matched(_BANDWIDTH, text)
    bits = 8 if match and match[4] == "B" else 1
    value = float(match[1] + (match[2] or "")) * _FACTORS[match[3]] * bits if match else math.nan
    if not 0 < value < math.inf:
        raise InputError(
            f"{text!r} is not a bandwidth above 0",
            hint="Write it like 0.2Gbit, 50Mbit/s or 10MB/s.",
        )
    return value


def parse_count(text: str) -> int:
    """A whole number from ``text`` such as ``7B``, ``0.5B``, ``22.6M``, ``300k`` or plain digits.
    Raises InputError."""
    match = matched(_COUNT, text)
    value = float(match[1] + (match[2] or "")) * _FACTORS[match[3]] if match else math.nan
    if not 1 <= value < math.inf:
        raise InputError(
            f"{text!r} is not a positive number", hint="Write it like 12, 22.6M or 7B."
        )
    return round(value)


def parse_share(text: str) -> float:
    """0.0086 from ``0.0086`` or ``0.86%``. Raises InputError."""
    match = matched(_SHARE, text)
    value = float(match[1] + (match[2] or "")) / (100 if match[3] else 1) if match else math.nan
    if not value < math.inf:
        raise InputError(f"{text!r} is not a share", hint="Write it like 0.0086 or 0.86%.")
    return value


def format_bandwidth(bits_per_second: float) -> str:
    """98.6 Mbit/s."""
    return with_prefix(bits_per_second, "bit/s")
