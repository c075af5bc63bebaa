"""Live torch models: an update writes exactly the new bits, into every copy of a tensor, or nothing
at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pulse_rl import Bits, MemoryStore, Publisher, State, Subscriber, Update, state_root
from pulse_rl.errors import StateMismatch
from pulse_rl.frameworks.torch import apply_, to_torch
from tests.support.interrupts import Boom, Steps
from tests.support.states import (
    Live,
    Rng,
    Tensors,
    all_dtypes,
    bits,
    history,
    mutated,
    present,
    publish_each,
    snapshot,
    weights,
)


def updates(*states: Any) -> list[Update]:
    """The full update to the first of some consecutive versions, and the patches to the others."""
    store = MemoryStore()
    publish_each(Publisher(store, stream="policy"), states)
    newcomer, follower = Subscriber(store, stream="policy"), Subscriber(store, stream="policy")
    follower.sync(0)
    found = [newcomer.sync(0), *(follower.sync(version) for version in range(1, len(states)))]
    return [update for update in found if update is not None]


def live(tensors: Tensors) -> dict[str, torch.Tensor]:
    return to_torch(State.of(tensors).copy())


def qwen(tied: bool, seed: int = 0) -> nn.Module:
    # It takes seconds, which a quick run has not.
    from tests.trainers.support import tiny

    return tiny(torch.bfloat16, seed, tie_word_embeddings=tied).requires_grad_(False)


def train(model: nn.Module, seed: int) -> None:
    """One pretended step: some weights of every parameter move by a few rounding steps."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mask = torch.rand(parameter.shape, generator=rng) < 0.05
            parameter[mask] *= 1.03


def test_every_dtype_is_written_in_place(rng: Rng) -> None:
    """Float8 and the unsigned integers too, which lack many of torch's kernels; NaN payloads
    survive."""
    old = all_dtypes(rng, 100)
    new = mutated(rng, old, 0.2)
    model = live(old)
    places = {n: t.data_ptr() for n, t in model.items()}
    full, patch = updates(old, new)
    apply_(model, patch)
    assert snapshot(model) == snapshot(new)
    apply_(model, full)
    assert snapshot(model) == snapshot(old)
    assert {n: t.data_ptr() for n, t in model.items()} == places


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 10, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(10)
        self.register_buffer("counts", torch.zeros(5, dtype=torch.int64))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float16))
        self.tied = self.linear


def test_a_module_holds_each_version_with_its_ties_and_buffers() -> None:
    store, model = MemoryStore(), Policy()
    with Publisher(store, stream="s") as publisher, Subscriber(store, stream="s") as worker:
        for version in range(3):
            trained = Policy()
            trained.counts += version
            root = publisher.publish(trained.state_dict()).root
            update = present(worker.sync())
            apply_(model, update)
            assert state_root(model.state_dict()) == root
            assert model.linear.weight.requires_grad


def as_bits(module: nn.Module) -> Tensors:
    state = State.of(module.state_dict()).copy()
    return {s.name: Bits(state.read(s.name).reshape(s.shape), s.dtype.name) for s in state.specs}


def test_a_model_that_requires_grad_is_written_without_a_graph(rng: Rng) -> None:
    layer = nn.Linear(4, 3)
    before = as_bits(layer)
    _, patch = updates(before, mutated(rng, before, 0.5))
    apply_(layer, patch)
    assert layer.weight.requires_grad
    assert layer.weight.is_leaf
    assert layer.weight.grad_fn is None
    layer(torch.ones(4)).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.slow
def test_an_interrupt_leaves_gradients_on(rng: Rng) -> None:
    """At any step, those of torch's context managers among them."""
    layer = nn.Linear(4, 3)
    before = as_bits(layer)
    _, patch = updates(before, mutated(rng, before, 0.5))
    number, interrupted = 0, True
    while interrupted:
        number, interrupted = number + 1, False
        try:
            Steps(number, also=("grad_mode", "_contextlib")).run(
                lambda: apply_({**layer.state_dict()}, patch)
            )
        except Boom:
            interrupted = True
        left, _ = torch.is_grad_enabled(), torch.set_grad_enabled(True)
        assert left, f"after an interrupt at step {number}"
    assert number > 50


@pytest.mark.slow
def test_tied_weights_of_qwen_have_one_root_and_stay_tied(tmp_path: Path) -> None:
    """`state_dict()` holds `lm_head.weight`; the checkpoint that Hugging Face saves does not."""
    trainer, worker = qwen(tied=True), qwen(tied=True, seed=1)
    assert "lm_head.weight" in trainer.state_dict()
    trainer.save_pretrained(tmp_path)
    state = State.of(trainer.state_dict())
    assert state.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in State.of(tmp_path)
    assert state_root(trainer.state_dict()) == state_root(tmp_path)
    store = MemoryStore()
    publisher, subscriber = Publisher(store, stream="policy"), Subscriber(store, stream="policy")
    for step in range(3):
        train(trainer, step)
        publisher.publish(trainer.state_dict())
        update = present(subscriber.sync())
        apply_(worker, update)
        assert state_root(worker.state_dict()) == update.root == state_root(trainer.state_dict())
        assert worker.lm_head.weight is worker.model.embed_tokens.weight
        assert subscriber.state.aliases == state.aliases
    tokens = torch.arange(10)[None]
    assert torch.equal(worker(tokens).logits, trainer(tokens).logits)


@pytest.mark.slow
def test_an_untied_copy_of_a_tied_tensor_is_written_too() -> None:
    """Engines often hold the head under a storage of its own."""
    trainer, worker = qwen(tied=True), qwen(tied=False, seed=1)
    assert worker.lm_head.weight.data_ptr() != worker.model.embed_tokens.weight.data_ptr()
    before = {n: t.clone() for n, t in trainer.state_dict().items() if n != "lm_head.weight"}
    first = updates(trainer.state_dict())[0]
    apply_(worker, first)
    train(trainer, 1)
    tied_before = before | {"lm_head.weight": before["model.embed_tokens.weight"]}
    _, patch = updates(tied_before, trainer.state_dict())
    apply_(worker, patch)
    assert snapshot(worker.state_dict()) == snapshot(trainer.state_dict())


def test_a_tie_that_is_cut_is_another_set_of_tensors(rng: Rng, store: MemoryStore) -> None:
    tied = weights(rng, 20, 4)
    publisher = Publisher(store, stream="policy")
    subscriber = Subscriber(store, stream="policy")
    live = Live()
    for head in (tied, Bits(tied.array.copy(), "BF16"), tied):
        done = publisher.publish({"embed": tied, "head": head})
        live.apply(subscriber.sync())
        assert done.anchored
        assert live.root == subscriber.root == state_root({"embed": tied, "head": head})
        assert subscriber.state.names == ["embed", "head"]


@pytest.mark.parametrize("held", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_model_with_only_one_name_of_a_tied_tensor(held: str, rng: Rng) -> None:
    tied = weights(rng, 10, 4)
    changed = mutated(rng, {"w": tied}, 0.3)["w"]
    names = ("model.embed_tokens.weight", "lm_head.weight")
    _, patch = updates(dict.fromkeys(names, tied), dict.fromkeys(names, changed))
    model = live({held: tied})
    apply_(model, patch)
    assert snapshot(model) == snapshot({held: changed})


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(
            lambda t: torch.empty(t.shape[::-1], dtype=t.dtype).T.copy_(t), id="transposed"
        ),
        pytest.param(
            lambda t: torch.empty(t.shape[0], 2 * t.shape[1], dtype=t.dtype)[:, ::2].copy_(t),
            id="strided",
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
def test_targets_that_are_not_contiguous(view: Any, dtype: str, rng: Rng) -> None:
    old = {"w": bits(rng, dtype, 6, 8)}
    new = mutated(rng, old, 0.3)
    target = view(live(old)["w"])
    assert not target.is_contiguous()
    full, patch = updates(old, new)
    apply_({"w": target}, patch)
    assert snapshot({"w": target}) == snapshot(new)
    apply_({"w": target}, full)
    assert snapshot({"w": target}) == snapshot(old)


def test_a_view_into_a_larger_tensor_leaves_the_rest_alone(rng: Rng) -> None:
    """Fused layouts: q, k and v are parts of one tensor."""
    whole = torch.full((3, 4, 5), 7.0)
    old = {
        name: Bits(whole[k].numpy().view(np.uint32).copy(), "F32") for k, name in enumerate("qk")
    }
    new = mutated(rng, old, 0.5)
    _, patch = updates(old, new)
    apply_({"q": whole[0], "k": whole[1]}, patch)
    assert snapshot({"q": whole[0], "k": whole[1]}) == snapshot(new)
    assert (whole[2] == 7).all()


MISMATCHES: dict[str, Any] = {
    "missing": lambda m: m.pop("b"),
    "reshaped": lambda m: m.update(b=m["b"].reshape(-1)),
    "wider": lambda m: m.update(b=torch.zeros(6, 5, dtype=torch.bfloat16)),
    "other dtype of the same width": lambda m: m.update(b=m["b"].view(torch.float16)),
    "other dtype": lambda m: m.update(b=m["b"].float()),
}


@pytest.mark.parametrize("mismatch", MISMATCHES.values(), ids=MISMATCHES)
@pytest.mark.parametrize("kind", ["full", "patch"])
def test_a_mismatch_is_told_before_the_first_write(mismatch: Any, kind: str, rng: Rng) -> None:
    old = {"a": weights(rng, 20), "b": weights(rng, 6, 4), "c": weights(rng, 5)}
    full, patch = updates(old, mutated(rng, old, 0.5))
    model = live(mutated(rng, old, 0.5))
    mismatch(model)
    before = snapshot(model)
    with pytest.raises(StateMismatch, match="'b'"):
        apply_(model, full if kind == "full" else patch)
    assert snapshot(model) == before


def test_an_untied_copy_of_another_shape_is_told_before_the_first_write(rng: Rng) -> None:
    tied = weights(rng, 6, 4)
    (full,) = updates({"embed": tied, "head": tied})
    model = live({"embed": weights(rng, 6, 4)}) | {"head": torch.zeros(8, 4, dtype=torch.bfloat16)}
    before = snapshot(model)
    with pytest.raises(StateMismatch, match="'head'"):
        apply_(model, full)
    assert snapshot(model) == before


def test_tensors_that_the_update_does_not_name_are_left_alone(rng: Rng) -> None:
    old = {"a": weights(rng, 20)}
    _, patch = updates(old, mutated(rng, old, 0.5))
    rotary = torch.arange(4.0)
    apply_(live(old) | {"rotary.inv_freq": rotary}, patch)
    assert rotary.tolist() == [0, 1, 2, 3]


def test_to_torch_gives_every_name_its_bits(rng: Rng) -> None:
    tensors: dict[str, Any] = dict(all_dtypes(rng))
    tensors["tied"] = tensors["BF16.values"]
    state = State.of(tensors)
    found = to_torch(state)
    assert snapshot(found) == snapshot(state)
    assert found["tied"].data_ptr() == found["BF16.values"].data_ptr()
    assert {n: tuple(t.shape) for n, t in found.items()} == {n: state.spec(n).shape for n in state}
    assert {n: t.nbytes for n, t in found.items()} == {n: state.spec(n).nbytes for n in state}


def test_to_torch_of_a_subscribers_state_is_a_copy(rng: Rng, store: MemoryStore) -> None:
    states = history(rng, 1)
    Publisher(store, stream="policy").publish(states[0])
    subscriber = Subscriber(store, stream="policy")
    subscriber.sync()
    for tensor in to_torch(subscriber.state).values():
        tensor.view(torch.uint8).reshape(-1)[:1].zero_() if tensor.dim() else tensor.zero_()
    assert state_root(subscriber.state) == subscriber.root == state_root(states[0])
