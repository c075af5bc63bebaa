"""What follows a stream is a checkpoint: transformers loads it, whatever published it.
`tests/promises/test_folder.py` shows that it stays one wherever its writer is killed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
)

from pulse_rl import Publisher, State, Subscriber, state_root
from pulse_rl.cli import main
from pulse_rl.frameworks.transformers import PulseCallback, checkpoint_files, checkpoint_weights
from tests.support.killed import follow
from tests.trainers.models import FAMILIES, family
from tests.trainers.support import arguments, sentences, tiny, tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"


def words() -> Any:
    found = tokenizer()
    found.chat_template = TEMPLATE
    return found


def same(one: Any, other: Any) -> bool:
    theirs = other.state_dict()
    return one.state_dict().keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items()
    )


def files_in(folder: Path) -> dict[str, bytes]:
    """What a folder shows, without weights and pulse's own."""
    return {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if not entry.name.startswith((".", "pulse.")) and entry.suffix != ".safetensors"
    }


def test_what_the_callback_publishes_is_followed_into_a_checkpoint(tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "followed"
    trained = tiny(dtype=torch.float32)
    trained.generation_config = GenerationConfig(max_new_tokens=7, eos_token_id=1, pad_token_id=0)
    settings = arguments(tmp_path, learning_rate=1e-3)
    callback = PulseCallback(str(store), stream="policy")
    Trainer(
        trained, settings, train_dataset=sentences(), processing_class=words(), callbacks=[callback]
    ).train()
    assert main(follow(store, out)) == 0
    followed = AutoModelForCausalLM.from_pretrained(out)
    assert followed.dtype == torch.bfloat16
    assert same(followed, trained.to(torch.bfloat16))
    assert followed.generation_config.max_new_tokens == 7
    loaded = PreTrainedTokenizerFast.from_pretrained(out)
    text = loaded.apply_chat_template([{"content": "w1 w2"}], tokenize=False)
    assert text == "w1 w2<eos>"
    assert loaded("w1 w9")["input_ids"] == words()("w1 w9")["input_ids"]
    trained.save_pretrained(tmp_path / "saved")
    words().save_pretrained(tmp_path / "saved")
    assert files_in(out) == files_in(tmp_path / "saved")
    assert followed.generate(torch.tensor([[3, 4, 5]]), do_sample=False).shape == (1, 10)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_loop_of_ones_own_publishes_checkpoints(name: str, tmp_path: Path) -> None:
    model = family(name, torch.float32)
    with Publisher(str(tmp_path / "store"), stream="policy") as publisher:
        publisher.publish(
            checkpoint_weights(model), dtype="BF16", files=checkpoint_files(torch.compile(model))
        )
    with Subscriber(str(tmp_path / "store"), stream="policy") as worker:
        worker.sync()
        worker.save(tmp_path / "followed")
    assert AutoConfig.from_pretrained(tmp_path / "followed").architectures == [type(model).__name__]
    assert same(
        AutoModelForCausalLM.from_pretrained(tmp_path / "followed"), model.to(torch.bfloat16)
    )


def test_a_sharded_checkpoint_is_published_and_followed_as_it_was(tmp_path: Path) -> None:
    first, out = tmp_path / "first", tmp_path / "followed"
    model = tiny(torch.bfloat16)
    model.save_pretrained(first, max_shard_size="60KB")
    words().save_pretrained(first)
    assert len(list(first.glob("*.safetensors"))) > 2
    assert main(["publish", str(first), str(tmp_path / "store"), "--stream", "policy"]) == 0
    for options in (["--sharded"], []):
        assert main(follow(tmp_path / "store", out, *options)) == 0
        assert same(AutoModelForCausalLM.from_pretrained(out), model)
        shards = {path.name for path in out.glob("*.safetensors")}
        assert shards == (
            {path.name for path in first.glob("*.safetensors")}
            if options
            else {"model.safetensors"}
        )
        if not options:
            assert files_in(out).keys() | {"model.safetensors.index.json"} == files_in(first).keys()
        shutil.rmtree(out)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_computes_what_the_trainer_does(tmp_path: Path, sharded: bool) -> None:
    """Tied, of another vocabulary in mid-run, untied, and with layers that share tensors: the files
    of all are those that were made when the training began."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    config.tie_word_embeddings = True
    model: Any = LlamaForCausalLM(config).eval()
    files, store = checkpoint_files(model, dtype=None), tmp_path / "store"

    def grow() -> None:
        model.resize_token_embeddings(104)

    def untie() -> None:
        model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())

    def share() -> None:
        model.model.layers[1].mlp = model.model.layers[0].mlp

    ids = torch.tensor([[1, 2, 3, 4]])
    with Publisher(store, stream="s") as publisher, Subscriber(store, stream="s") as worker:
        for number, change in enumerate((lambda: None, grow, untie, share)):
            change()
            publisher.publish(checkpoint_weights(model), files=files)
            worker.sync()
            out = tmp_path / str(number)
            worker.save(out, sharded=sharded)
            loaded, found = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
            assert not found["missing_keys"]
            assert torch.equal(loaded(ids).logits, model(ids).logits)
            assert AutoConfig.from_pretrained(out).vocab_size == (104 if number else 96)
            # The folder is the state, aliases included, so that a worker starts with it.
            assert state_root(out) == worker.root
            assert State.of(out).names == worker.state.names or number < 2
            with Subscriber(store, stream="s", base=out) as other:
                assert other.sync() is None
