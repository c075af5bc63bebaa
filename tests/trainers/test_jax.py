"""JAX and Flax as publishers and followers: shards, a checkpoint's names, and a torch follower
beside them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.states import present

if "jax" not in sys.modules:  # once its backend is there, the number of devices is fixed
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
jax = pytest.importorskip("jax")
flax = pytest.importorskip("flax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from flax import linen, nnx  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from pulse_rl import MemoryStore, Publisher, State, Subscriber, state_root  # noqa: E402
from pulse_rl.errors import InputError, StateMismatch, UnsupportedTensor  # noqa: E402
from pulse_rl.frameworks.jax import apply, weights  # noqa: E402
from pulse_rl.frameworks.torch import apply_  # noqa: E402

SPECS = [
    PartitionSpec(),
    PartitionSpec("a"),
    PartitionSpec(None, "b"),
    PartitionSpec("a", "b"),
    PartitionSpec(("a", "b")),
]


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def sharded(tree: Any, mesh: Mesh) -> Any:
    """Its matrices, each in another way over the mesh; other arrays are replicated."""
    leaves, structure = jax.tree.flatten(tree)
    specs = [
        SPECS[k % len(SPECS)] if leaf.ndim == 2 else PartitionSpec()
        for k, leaf in enumerate(leaves)
    ]
    placed = [
        jax.device_put(leaf, NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    return jax.tree.unflatten(structure, placed)


def parameters(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    layers = {
        f"layer{k}": {
            "kernel": jnp.asarray(rng.standard_normal((16, 24)), jnp.bfloat16),
            "bias": jnp.asarray(rng.standard_normal(24), jnp.bfloat16),
        }
        for k in range(5)
    }
    return {"params": layers}


class Torch(torch.nn.Module):
    """The same layers, as a checkpoint has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 24) for _ in range(5)]).bfloat16()


def named(path: str) -> Any:
    layer, part = path.removeprefix("params.layer").split(".")
    if part == "bias":
        return f"layers.{layer}.bias"
    return f"layers.{layer}.weight", lambda kernel: kernel.T


def steps(params: Any, count: int) -> Iterator[Any]:
    """The parameters after each step of AdamW."""
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = sum(
                (x @ each["kernel"] + each["bias"]).astype(jnp.float32)
                for each in params["params"].values()
            )
            return (y * y).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for k in range(count):
        params, state = step(
            params, state, jax.random.normal(jax.random.key(k), (4, 16), jnp.bfloat16)
        )
        yield params


@pytest.mark.parametrize("donate", [False, True])
def test_ten_steps_of_a_sharded_tree_reach_torch_and_jax(mesh: Mesh, donate: bool) -> None:
    store = MemoryStore()
    trained, served, model = sharded(parameters(), mesh), sharded(parameters(1), mesh), Torch()
    shardings = jax.tree.map(lambda leaf: leaf.sharding, served)
    with (
        Publisher(store, stream="s", threads=2) as publisher,
        Subscriber(store, stream="s") as for_torch,
        Subscriber(store, stream="s") as for_jax,
    ):
        publisher.publish(weights(trained, named))
        for params in steps(trained, 10):
            publisher.publish(weights(params, named))
            update = present(for_torch.sync())
            apply_(model, update)
            update = present(for_jax.sync())
            old, served = served, apply(served, update, named, donate=donate)
            assert any(leaf.is_deleted() for leaf in jax.tree.leaves(old)) == donate
            roots = {
                state_root(weights(params, named)),
                state_root(weights(served, named)),
                for_jax.root,
            }
            assert {*roots, state_root(model.state_dict())} == {for_torch.root}
            assert jax.tree.map(lambda leaf: leaf.sharding, served) == shardings
        assert update.previous == 9
        assert not update.full


def test_flax_modules_have_names_and_no_copies() -> None:
    dense = linen.Dense(4, param_dtype=jnp.bfloat16).init(jax.random.key(0), jnp.ones((2, 3)))
    assert weights(dense).names == ["params.bias", "params.kernel"]

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(3, 4, rngs=nnx.Rngs(0))])
            self.drop = nnx.Dropout(0.1, rngs=nnx.Rngs(1))

    model = Model()
    state = nnx.state(model, nnx.Param)
    assert weights(state).names == ["layers.0.bias", "layers.0.kernel"]
    kernel = model.layers[0].kernel[...]
    read = weights(state).read("layers.0.kernel")
    assert read.ctypes.data == kernel.unsafe_buffer_pointer()
    with pytest.raises(UnsupportedTensor, match="key"):
        weights(nnx.state(model))
    store = MemoryStore()
    with Publisher(store, stream="s") as publisher, Subscriber(store, stream="s") as worker:
        publisher.publish(weights(jax.tree.map(lambda leaf: leaf + 1, state)))
        update = present(worker.sync())
        nnx.update(model, apply(state, update))
        assert (model.layers[0].kernel[...] == kernel + 1).all()


@pytest.mark.parametrize("donate", [False, True])
def test_every_width_in_every_kind_of_shard_holds_each_version(mesh: Mesh, donate: bool) -> None:
    """An array in two places and a scalar among them. The bits are any: NaNs with payloads too."""
    kinds = ("bfloat16", "bool", "float16", "float32", "float8_e4m3fn", "int8")
    zeros = {name: jnp.zeros((8, 16), name) for name in kinds}
    tree = {**sharded(zeros, mesh), "scalar": jnp.float32(1)}
    tree["tied"] = tree["bfloat16"]
    state, store, rng = weights(tree).copy(), MemoryStore(), np.random.default_rng(0)
    with Publisher(store, stream="s") as publisher, Subscriber(store, stream="s") as worker:
        for _ in range(4):
            for spec in state.specs:
                bits = state.read(spec.name)
                places = np.flatnonzero(rng.random(bits.size) < 0.3)
                most = 2 if spec.dtype.name == "BOOL" else 1 << (8 * spec.dtype.width)
                bits[places] ^= rng.integers(1, most, places.size, bits.dtype)
            root = publisher.publish(state).root
            if worker.version is None or rng.random() < 0.7:  # else two versions come at once
                update = present(worker.sync())
                tree = apply(tree, update, donate=donate)
                assert state_root(weights(tree)) == root
                assert tree["tied"] is tree["bfloat16"]


RANK = """
import sys
rank, port, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
import jax, jax.numpy as jnp, numpy as np, torch.distributed as dist
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from jax.sharding import NamedSharding, PartitionSpec as P
from pulse_rl.frameworks.fsdp import ShardedPublisher
from pulse_rl.frameworks.jax import apply
from pulse_rl import Subscriber
dist.init_process_group("gloo", init_method=f"file://{store}-meeting", rank=rank, world_size=2)
mesh = jax.make_mesh((2, 4), ("a", "b"))
def tree(add):
    host = np.arange(16 * 24).reshape(16, 24).astype(jnp.bfloat16)
    host[3:5, 1:20] += add
    specs = {"rows": P("a"), "columns": P(None, "b"), "both": P("a", "b"), "turned": P("b", "a"), "all": P()}
    return {name: jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda at: host[at])
            for name, spec in specs.items()}
with ShardedPublisher(store, stream="s") as publisher, Subscriber(store, stream="s") as worker:
    publisher.publish(tree(0))
    held = apply(tree(5), worker.sync())
    done = publisher.publish(tree(1))
    held = apply(held, worker.sync())
for name, array in tree(1).items():
    for one, other in zip(array.addressable_shards, held[name].addressable_shards):
        assert (np.asarray(one.data) == np.asarray(other.data)).all(), name
print(done.version, done.patch_bytes)
"""  # noqa: E501


def test_two_processes_publish_their_own_shards(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    command = [sys.executable, "-c", RANK]
    environment = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(port), store], env=environment, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs[0].split()[0] == b"1"
    host = np.arange(16 * 24).reshape(16, 24).astype(jnp.bfloat16)
    host[3:5, 1:20] += 1
    with Subscriber(store, stream="s") as worker:
        worker.sync()
        assert worker.root == state_root(
            {name: host.copy() for name in ("rows", "columns", "both", "turned", "all")}
        )


def test_what_is_refused(mesh: Mesh) -> None:
    tree, store = parameters(), MemoryStore()
    for names, match in (
        ({}, "names has no"),
        (lambda _: "x", "two arrays"),
        (lambda path: (path, lambda kernel: kernel + 1), "must return a view"),
        (lambda path: (path, lambda kernel: kernel[:1]), "must return a view"),
    ):
        with pytest.raises(InputError, match=match):
            weights(tree, names)
    with pytest.raises(UnsupportedTensor, match="not an array"):
        weights({"x": "text"})
    with Publisher(store, stream="s") as publisher, Subscriber(store, stream="s") as worker:
        publisher.publish(weights(tree))
        update = present(worker.sync())
        with pytest.raises(StateMismatch, match="no tensor"):
            apply({"other": jnp.ones(3)}, update)
        with pytest.raises(StateMismatch, match="BF16"):
            apply(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree), update)
        assert not update.acknowledged
    assert isinstance(weights(tree), State)
