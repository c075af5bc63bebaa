"""The library beside the peers, on the same state in one run: bytes, speed, memory, calling lines,
and who hashes what.

    python -m benchmarks.real_peers [--shape 30m] [--lr 3e-6] [--times 2] [--peers NAME ...]
    [--save]

PEER_GRAIL=CHECKOUT   of one-covenant/grail, the PULSE paper's code; its packages are zstandard and
                      xxhash
PEER_SLIME=CHECKOUT   of THUDM/slime: its disk delta (xor), and its patch of SGLang, which receives;
                      the same packages
PEER_NEMO=CHECKOUT    of NVIDIA-NeMo/RL: its sparse refit (xor); its package is zstandard
PEER_VLLM=PYTHON      of an environment with vLLM: what its sparse weight transfer sends, and its
                      loader of that
zipnn                 the package, with its own delta mode
zstd, rsync           the programs, on files of the states in memory

A peer's own code runs, on a CPU; of its frameworks (Ray, Megatron, NCCL) stand-ins are imported,
since none of them touches the bytes. "layout": written from a description (`benchmarks.peers`). One
that is not to be had is named as absent. publish: from two states in memory to what would be sent;
consume: from that and the old state to the new one; rsync does both at once. Every peer is measured
in a process of its own; every result is compared bit for bit. GB are of model bytes, seconds the
best of some rounds by turns; cpu: of the processor for both, all threads; peaks are in states,
beyond the old and new one. Lines are those of the peer's class here, set-up and stand-ins included.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from benchmarks import results
from benchmarks.measure import Mapping16, state_of, timed
from benchmarks.peers import peers as layouts
from benchmarks.synthetic import SHAPES, pair
from pulse_rl import MemoryStore, Publisher, Subscriber
from pulse_rl._util.threads import default_threads
from pulse_rl.state.digest import state_digest


class Absent(Exception):
    """Why a peer cannot be measured here."""


class RealPeer(ABC):
    """``kind``: whose code runs. ``hashes`` says what proves the result, and with what."""

    kind = "their code"
    hashes: str

    def __init__(self, old: Mapping16, new: Mapping16) -> None:
        self.old, self.new = old, new

    def prepare(self) -> None:  # noqa: B027  # most peers need none
        """What each round begins with, outside the clock."""

    @abstractmethod
    def publish(self) -> int:
        """Makes what would be sent; how many bytes it has."""

    @abstractmethod
    def consume(self) -> None:
        """Turns the old state and what was sent into the new state."""

    @abstractmethod
    def check(self) -> None:
        """Raises AssertionError unless `consume` made the new state."""


class Pulse(RealPeer):
    kind = "this library"
    hashes = "all leaves, payload, manifest: SHA-256; each block decoded again"

    def __init__(self, old: Mapping16, new: Mapping16) -> None:
        super().__init__(old, new)
        self.states = state_of(old), state_of(new)
        self.root = ""

    def prepare(self) -> None:
        store = MemoryStore()
        self.publisher, self.subscriber = (
            Publisher(store, stream="peers"),
            Subscriber(store, stream="peers"),
        )
        self.publisher.publish(self.states[0])
        if update := self.subscriber.sync():
            update.acknowledge()

    def publish(self) -> int:
        published = self.publisher.publish(self.states[1])
        self.root = published.root
        return published.patch_bytes

    def consume(self) -> None:
        self.subscriber.sync()

    def check(self) -> None:
        assert self.subscriber.root == self.root == state_digest(self.states[1]).root


class Grail(RealPeer):
    hashes = "all weights once on either side: xxh3-128; no proof, no commit"

    def __init__(self, old: Mapping16, new: Mapping16) -> None:
        super().__init__(old, new)
        folder = _checkout("PEER_GRAIL") / "grail" / "infrastructure"
        self.codec, self.delta = (
            _module(folder / "sparse_codec.py"),
            _module(folder / "delta_checkpoint.py"),
        )
        self.a, self.b = _bf16(old), _bf16(new)
        self.base, self.data, self.digest, self.made = self.a, b"", "", self.a

    def prepare(self) -> None:
        self.base = {
            name: tensor.clone() for name, tensor in self.a.items()
        }  # it is patched in place

    def publish(self) -> int:
        sparse, shapes, _ = self.delta.compute_sparse_delta(self.b, self.base)
        self.data = self.codec.encode_sparse_delta_v3_1(sparse, shapes)
        self.digest = self.delta.compute_weights_hash(self.b)
        return len(self.data)

    def consume(self) -> None:
        sparse, shapes = self.codec.decode_sparse_delta_v3_1(self.data)
        self.made = self.delta.apply_sparse_delta(self.base, sparse, shapes)
        assert self.delta.verify_weights_hash(self.made, self.digest)

    def check(self) -> None:
        _equal(self.made, self.b)


class Slime(RealPeer):
    """The trainer's half of its class runs in a group of one; SGLang's half is in the patch that
    slime brings."""

    hashes = "changed tensors once on either side: xxh3-128"

    def __init__(self, old: Mapping16, new: Mapping16) -> None:
        super().__init__(old, new)
        root = _checkout("PEER_SLIME")
        base = ModuleType("peer.update_weight_from_distributed")
        base.UpdateWeightFromDistributed = object  # type: ignore[attr-defined]
        _stand_ins("peer", "ray", "ray.actor", "megatron", "megatron.core", "slime", "slime.utils")
        _stand_ins("slime.utils.distributed_utils", peer=base)
        sys.modules["slime.utils.disk_delta"] = _module(root / "slime/utils/disk_delta.py")
        folder = root / "slime/backends/megatron_utils/update_weight"
        sender = _module(folder / "update_weight_from_disk_delta.py", "peer.disk_delta")
        ones = {"all_gather_object": lambda found, mine, group: found.__setitem__(0, mine)}
        sender.dist = SimpleNamespace(  # type: ignore[attr-defined]
            get_rank=lambda: 0, get_world_size=lambda: 1, barrier=lambda group: None, **ones
        )
        patch = (root / "docker/patch/latest/sglang-pull_weights.patch").read_text()
        added = patch.partition("+++ b/python/sglang/srt/weight_sync/local_checkpoint.py\n")[
            2
        ].partition("\ndiff --git")[0]
        (_FOLDER / "peer_sglang.py").write_text(
            "\n".join(x[1:] for x in added.splitlines() if x[:1] == "+")
        )
        self.receiver = _module(_FOLDER / "peer_sglang.py")
        self.sender = object.__new__(sender.UpdateWeightFromDiskDelta)
        self.sender.__dict__ |= {
            "delta_dir": str(_FOLDER / "deltas"),
            "delta_encoding": "xor",
            "weight_version": 1,
        }
        self.sender.__dict__ |= {"checksum_algorithm": "xxh3-128", "_is_pp_src_rank": True}
        self.sender._iter_hf_tensors = lambda: iter(_bf16(new).items())
        self.checkpoint, self.local = _FOLDER / "base", _FOLDER / "local"

    def prepare(self) -> None:
        for folder in (_FOLDER / "deltas", self.checkpoint, self.local):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        _write(self.old, self.checkpoint / "model.safetensors")
        self.receiver.pull(str(self.local), str(self.checkpoint), self.sender.delta_dir, 0)
        self.sender._snapshot = {
            name: bits.reshape(-1).view(np.uint8).copy() for name, bits in self.old.items()
        }

    def publish(self) -> int:
        self.sender._publish()
        return sum(file.stat().st_size for file in (_FOLDER / "deltas").rglob("*.*"))

    def consume(self) -> None:
        self.receiver.pull(str(self.local), str(self.checkpoint), self.sender.delta_dir, 1)

    def check(self) -> None:
        _compare(self.local / "model.safetensors", self.new)


class Nemo(RealPeer):
    """The transport collects what would be sent; the receiver is its applier, by a loader without
    fusion."""

    hashes = "payload: blake2b-128"

    def __init__(self, old: Mapping16, new: Mapping16) -> None:
        import torch

        super().__init__(old, new)
        utils = _checkout("PEER_NEMO") / "nemo_rl/utils"
        stand_in = _stand_ins(
            "nemo_rl.utils", "nemo_rl.utils.nsys", "nemo_rl.models.generation.vllm.config"
        )
        _stand_ins("nemo_rl.utils.packed_tensor", "nemo_rl.utils.weight_transfer_http")
        sys.modules["nemo_rl.utils.nsys"].wrap_with_nvtx_name = lambda name: lambda call: call  # type: ignore[attr-defined]
        self.codec = stand_in.weight_transfer_sparse_codec = _module(
            utils / "weight_transfer_sparse_codec.py", "nemo_rl.utils.weight_transfer_sparse_codec"
        )
        self.stream = _module(utils / "weight_transfer_stream.py")
        applier = _module(utils.parent / "models/generation/vllm/vllm_sparse_delta.py")
        # Its own defaults; two workers for two cores.
        delta = SimpleNamespace(
            encoding="xor", sparse_bucket_size_bytes=512 << 20, zstd_threads={"s3": 0}
        )
        delta.export_chunk_bytes = {"s3": 64 << 20}
        self.config = SimpleNamespace(delta_compression=delta, verify_samples_per_payload=0)
        self.config.baseline = SimpleNamespace(in_memory=True, mmap_dir=None)
        self.config.tuning = SimpleNamespace(encode_workers={"s3": default_threads()})
        self.a, self.b, self.bodies = _bf16(old), _bf16(new), list[bytes]()
        self.model = _loader(torch, self.a)
        self.applier = applier.VllmSparseDeltaApplier(
            SimpleNamespace(model=self.model), torch.device("cpu")
        )

    def prepare(self) -> None:
        self.tracker = self.codec.DeltaCompressionTracker(self.config)
        self.tracker.snapshot_baseline(self.a.items())
        self.bodies.clear()
        self.model.load_weights(self.a.items())

    def publish(self) -> int:
        def send(body: bytes, index: int, candidates: int) -> dict[str, Any]:
            self.bodies.append(body)
            return {"receiver": {}}

        transport = self.stream.SparseRefitTransport("s3", 2, send, lambda: None)
        one = {
            "delta_tracker": self.tracker,
            "transport": transport,
            "shard_rank": 0,
            "shard_count": 1,
        }
        self.stream.stream_sparse_delta_payloads(iter(self.b.items()), **one)
        self.tracker.on_sync_succeeded()
        self.tracker._wait_for_baseline_commits()
        self.sums = [self.stream.sparse_payload_checksum(body) for body in self.bodies]
        return sum(map(len, self.bodies))

    def consume(self) -> None:
        raw = map(self.stream.decode_sparse_payload, self.bodies, self.sums)
        self.applier.update_weights_from_decoded_sparse_payload(*raw)
        self.applier.finish_sparse_delta_refit()

    def check(self) -> None:
        _equal(self.model.tensors, self.b)


class Vllm(RealPeer):
    """Its trainer takes patches that the user makes; NCCL would send each patch's indices and
    values as they are."""

    hashes = "nothing; indices are checked"

    def __init__(self, old: Mapping16, new: Mapping16) -> None:
        super().__init__(old, new)
        try:
            import torch
            from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch
            from vllm.model_executor.model_loader import checkpoint_weight_patch
        except ImportError as error:
            raise Absent(
                "PEER_VLLM is not set to the Python of an environment with vLLM"
            ) from error
        self.torch, self.make, self.loader = torch, SparseWeightPatch, checkpoint_weight_patch
        self.a, self.b = _bf16(old), _bf16(new)
        self.model = _loader(torch, self.a)

    def prepare(self) -> None:
        self.model.load_weights(self.a.items())

    def publish(self) -> int:
        self.patches = []
        for name, new in self.b.items():
            index = (
                new.view(-1).view(self.torch.int16) != self.a[name].view(-1).view(self.torch.int16)
            ).nonzero()
            index = index.view(-1).to(self.torch.int32)
            self.patches.append(self.make(name, index, new.view(-1)[index], tuple(new.shape)))
        return sum(patch.indices.nbytes + patch.values.nbytes for patch in self.patches)

    def consume(self) -> None:
        one = self.loader.CheckpointWeightPatch
        patches = [
            one(p.name, p.full_shape, p.values.dtype, p.values, p.indices) for p in self.patches
        ]
        self.loader.load_checkpoint_weight_patches(self.model, patches)

    def check(self) -> None:
        _equal(self.model.tensors, self.b)


class Layout(RealPeer):
    kind, hashes, name = "layout", "nothing", "xor+zstd1"

    def __init__(self, old: Mapping16, new: Mapping16) -> None:
        super().__init__(old, new)
        found = [layout for layout in layouts() if layout.name == self.name]
        if not found:
            raise Absent("the package is not installed")
        self.layout, self.data = found[0], b""
        self.a, self.b = (
            [v.reshape(-1) for v in old.values()],
            [v.reshape(-1) for v in new.values()],
        )
        self.made = [v.copy() for v in self.a]

    def publish(self) -> int:
        self.data = self.layout.encode(self.a, self.b, default_threads())
        return len(self.data)

    def prepare(self) -> None:
        for made, old in zip(self.made, self.a, strict=True):
            made[:] = old

    def consume(self) -> None:
        self.layout.decode(self.made, self.data, default_threads())

    def check(self) -> None:
        assert all(map(np.array_equal, self.made, self.b))


class ZipNN(Layout):
    kind, name = "their code", "zipnn"


class PatchFrom(RealPeer):
    """Both ends are given the states as files, which no clock counts."""

    kind, program, hashes = "program", "zstd", "xxh64 of the whole"

    def __init__(self, old: Mapping16, new: Mapping16) -> None:
        super().__init__(old, new)
        if shutil.which(self.program) is None:
            raise Absent("the program is not installed")
        self.a, self.b, self.made = (_FOLDER / name for name in ("old", "new", "made"))
        _write(old, self.a)
        _write(new, self.b)

    def publish(self) -> int:
        _run(
            "zstd",
            "-q",
            "-f",
            "-1",
            "-T0",
            "--long=31",
            f"--patch-from={self.a}",
            self.b,
            "-o",
            _FOLDER / "patch",
        )
        return (_FOLDER / "patch").stat().st_size

    def consume(self) -> None:
        _run(
            "zstd",
            "-q",
            "-f",
            "-d",
            "--long=31",
            f"--patch-from={self.a}",
            _FOLDER / "patch",
            "-o",
            self.made,
        )

    def check(self) -> None:
        _compare(self.made, self.new)


class Rsync(PatchFrom):
    program, hashes = "rsync", "the whole file: xxh128"

    def prepare(self) -> None:
        shutil.copyfile(self.a, self.made)

    def publish(self) -> int:
        said = _run(
            "rsync", "--no-whole-file", "--inplace", "--ignore-times", "--stats", self.b, self.made
        )
        return sum(
            int(n.replace(",", ""))
            for n in re.findall(r"Total bytes (?:sent|received): ([\d,]+)", said)
        )

    def consume(self) -> None:
        pass


# In a process: in the first much is done for the first time.
_ROUNDS = 2
# Of the process's files, in memory where there is a file system in memory.
_FOLDER = Path()


def _checkout(variable: str) -> Path:
    if variable not in os.environ:
        raise Absent(f"{variable} is not set")
    return Path(os.environ[variable])


def _stand_ins(*names: str, **modules: ModuleType) -> Any:
    """Modules that a peer's file imports and that do nothing here; the first of them."""
    for name in names:
        sys.modules[name] = MagicMock()
    for package, module in modules.items():
        sys.modules[f"{package}.{module.__name__.rpartition('.')[2]}"] = module
    return sys.modules[names[0]]


def _module(path: Path, name: str = "") -> ModuleType:
    """A file of a checkout on its own, without the packages that its package imports."""
    name = name or f"peer_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.exists() or spec is None or spec.loader is None:
        raise Absent(f"there is no {path.name} in the checkout")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise Absent(f"its package {error.name} is not installed") from error
    return module


def _bf16(state: Mapping16) -> dict[str, Any]:
    import torch

    return {
        name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        for name, bits in state.items()
    }


def _loader(torch: Any, state: dict[str, Any]) -> Any:
    """A model whose ``load_weights`` copies each tensor to the parameter of its name."""

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.tensors = {name: tensor.clone() for name, tensor in state.items()}
            for at, tensor in enumerate(self.tensors.values()):
                self.register_buffer(f"b{at}", tensor)

        def load_weights(self, weights: Any) -> set[str]:
            return {
                name for name, tensor in weights if self.tensors[name].copy_(tensor) is not None
            }

    return Model()


def _equal(made: dict[str, Any], new: dict[str, Any]) -> None:
    import torch

    assert all(
        torch.equal(made[name].view(torch.int16), tensor.view(torch.int16))
        for name, tensor in new.items()
    )


def _write(state: Mapping16, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(_bf16(state), path)


def _compare(path: Path, state: Mapping16) -> None:
    from safetensors.torch import load_file

    _equal(load_file(path), _bf16(state))


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


PEERS: dict[str, type[RealPeer]] = {
    "pulse": Pulse,
    "PULSE's code (grail)": Grail,
    "NeMo RL sparse refit": Nemo,
    "slime disk delta": Slime,
    "vLLM sparse patches": Vllm,
    "XOR + zstd": Layout,
    "ZipNN delta": ZipNN,
    "zstd --patch-from": PatchFrom,
    "rsync": Rsync,
}


def measure(name: str, shape: str, lr: float) -> dict[str, Any]:
    global _FOLDER
    old, new = pair(SHAPES[shape], lr)
    nbytes = sum(v.nbytes for v in old.values())
    changed = sum(int(np.count_nonzero(old[k] != new[k])) for k in old)
    kind = PEERS[name]
    own = [each for each in kind.__mro__ if issubclass(each, RealPeer) and each is not RealPeer]
    lines = sum(len(inspect.getsource(each).splitlines()) for each in own)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        _FOLDER = Path(folder)
        try:
            peer = kind(old, new)
        except Absent as absent:
            return {"peer": name, "absent": str(absent)}
        found: dict[str, Any] = {
            "peer": name,
            "kind": kind.kind,
            "hashes": kind.hashes,
            "lines": lines,
        }
        for _ in range(_ROUNDS):
            peer.prepare()
            before = _children()
            published, size = timed(peer.publish)
            consumed, _ = timed(peer.consume)
            peer.check()
            spent = _children()
            peak = spent[1] if kind.kind == "program" else max(published.peak, consumed.peak)
            figures = {
                "publish": nbytes / published.wall / 1e9,
                "consume": nbytes / consumed.wall / 1e9,
            }
            figures["cpu"] = (published.cpu + consumed.cpu + spent[0] - before[0]) / nbytes * 1e9
            found |= _best(found, figures | {"peak": peak / nbytes})
    found |= {"bytes": size, "bytes_per_changed": size / changed, "density": 2 * changed / nbytes}
    if kind is Rsync:
        found["consume"] = found["publish"]
    return found


def _best(old: dict[str, Any], new: dict[str, Any]) -> dict[str, float]:
    """Of two rounds."""
    choices = {"publish": max, "consume": max, "cpu": min, "peak": max}
    return {key: choose(new[key], old.get(key, new[key])) for key, choose in choices.items()}


def _children() -> tuple[float, int]:
    """Processor seconds of the programs that ran, and the most memory that one of them had."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime, used.ru_maxrss << 10


def report(shape: str, lr: float, times: int, names: list[str]) -> list[dict[str, Any]]:
    """Measures and prints one row a peer."""
    print(
        f"\nbeside others, {shape}, lr {lr:g}; GB/s of model bytes, processor seconds a GB, peak "
        "in states"
    )
    found: dict[str, dict[str, Any]] = {}
    for name in names * times:  # by turns: what else the machine does meets all of them
        python = (
            os.environ.get("PEER_VLLM", sys.executable) if PEERS[name] is Vllm else sys.executable
        )
        command = [
            python,
            "-m",
            "benchmarks.real_peers",
            "--shape",
            shape,
            "--lr",
            str(lr),
            "--measure",
            name,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        found[name] = row | ({} if "absent" in row else _best(found.get(name, {}), row))
    head = (
        f"{'':22}{'bytes':>12}{'a change':>10}{'publish':>9}{'consume':>9}"
        f"{'cpu':>7}{'peak':>7}{'lines':>6}"
    )
    print(f"{head}  whose; hash")
    for name, r in found.items():
        if "absent" in r:
            print(f"{name:22}absent: {r['absent']}")
            continue
        cells = (
            f"{r['bytes']:12,}{r['bytes_per_changed']:10.3f}{r['publish']:9.2f}"
            f"{r['consume']:9.2f}{r['cpu']:7.2f}"
        )
        print(f"{name:22}{cells}{r['peak']:7.2f}{r['lines']:6}  {r['kind']}; {r['hashes']}")
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="the library beside its peers")
    parser.add_argument("--shape", choices=list(SHAPES), default="30m")
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/peers.jsonl")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.shape, args.lr)))
        return
    rows = report(args.shape, args.lr, args.times, args.peers)
    if args.save:
        command = f"python -m benchmarks.real_peers --shape {args.shape} --lr {args.lr:g}"
        results.save("peers", command, rows, shape=args.shape, lr=args.lr)


if __name__ == "__main__":
    main()
