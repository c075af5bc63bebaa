"""Checkpoints on disk: what safetensors and Hugging Face write is read, what is written they can
read, and the rest is refused with a typed error."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pulse_rl import State, state_root
from pulse_rl.errors import CorruptCheckpoint, FormatError, InputError, UnsupportedTensor
from pulse_rl.follow.checkpoint import FILE_NAME, INDEX_NAME, load, save
from pulse_rl.frameworks.torch import to_torch
from tests.support.checkpoints import HOSTILE, entry, file_of
from tests.support.states import Rng, all_dtypes, policy, snapshot


@pytest.fixture(scope="module")
def qwen() -> Any:
    # It takes seconds, which a quick run has not.
    from tests.trainers.support import tiny

    return tiny(torch.bfloat16, tie_word_embeddings=False)


def test_safetensors_loads_what_is_saved(tmp_path: Path, rng: Rng) -> None:
    state = State.of(all_dtypes(rng))
    save(tmp_path / "model.safetensors", state, {"format": "pt", "note": "größe"})
    assert snapshot(load_file(tmp_path / "model.safetensors")) == snapshot(state)
    loaded, metadata = load(tmp_path / "model.safetensors")
    assert snapshot(loaded) == snapshot(state)
    assert metadata == {"format": "pt", "note": "größe"}


def test_what_safetensors_saves_is_loaded(tmp_path: Path, rng: Rng) -> None:
    tensors = to_torch(State.of(all_dtypes(rng)).copy())
    save_file(tensors, tmp_path / "model.safetensors", {"a": "b"})
    loaded, metadata = load(tmp_path)
    assert snapshot(loaded) == snapshot(tensors)
    assert metadata == {"a": "b"}


def test_a_state_of_no_tensors(tmp_path: Path) -> None:
    save(tmp_path / "none.safetensors", State.of({}))
    assert load_file(tmp_path / "none.safetensors") == {}
    assert snapshot(load(tmp_path / "none.safetensors")[0]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["20KB", "10GB"], ids=["sharded", "one-file"])
def test_folders_that_hugging_face_writes(tmp_path: Path, qwen: Any, shard: str) -> None:
    qwen.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / INDEX_NAME).exists() == (shard == "20KB")
    assert snapshot(State.of(tmp_path)) == snapshot(qwen.state_dict())
    assert state_root(tmp_path) == state_root(str(tmp_path)) == state_root(qwen.state_dict())


@pytest.mark.slow
def test_hugging_face_loads_what_is_saved(tmp_path: Path, qwen: Any) -> None:
    qwen.config.save_pretrained(tmp_path)
    save(tmp_path / FILE_NAME, State.of(qwen.state_dict()), {"format": "pt"})
    again = type(qwen).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert state_root(again.state_dict()) == state_root(qwen.state_dict())


def test_tensors_at_odd_offsets_are_read(tmp_path: Path) -> None:
    """Other writers need not sort by width: a 4-byte element may start at any byte."""
    values = np.arange(5, dtype=np.float32)
    header = {"a": entry("U8", [3], [0, 3]), "b": entry("F32", [5], [3, 23])}
    (tmp_path / "odd.safetensors").write_bytes(file_of(header, b"xyz" + values.tobytes()))
    state, _ = load(tmp_path / "odd.safetensors")
    assert (state.read("a").tobytes(), state.read("b").tobytes()) == (b"xyz", values.tobytes())


def test_a_loaded_checkpoint_cannot_be_written_through(tmp_path: Path, rng: Rng) -> None:
    save(tmp_path / "model.safetensors", State.of(policy(rng)))
    state, _ = load(tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        state.read("steps")[0] = 1


def test_aliases_are_not_written(tmp_path: Path) -> None:
    tied = np.zeros(4, np.float32)
    state = State.of({"embed": tied, "head": tied})
    save(tmp_path / "model.safetensors", state)
    assert list(load_file(tmp_path / "model.safetensors")) == ["embed"]
    assert state_root(tmp_path) == state_root(state)


def test_files_in_a_folder_without_an_index(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", State.of({"a": np.zeros(2)}))
    save(tmp_path / "b.safetensors", State.of({"b": np.zeros(2)}))
    assert load(tmp_path)[0].names == ["a", "b"]
    save(tmp_path / "c.safetensors", State.of({"a": np.zeros(2)}))
    with pytest.raises(CorruptCheckpoint, match="'a' is in two files"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ("model-00001-of-00003 model-00002-of-00003", "not one whole"),
        ("model-00001-of-00002 model-00003-of-00003", "not one whole"),
        ("model-1-of-2 model-2-of-2 other", "not one whole"),
        ("a-1-of-2 b-2-of-2", "not one whole"),
        ("model model-00001-of-00002", "not one whole"),
        ("model model-1-of-1 +model-1-of-1", "two checkpoints"),
        ("model-1-of-2 model-2-of-2 +model-2-of-2 +model-1-of-2", "of two saves"),
        ("model-2-of-2 +model-1-of-2", "No such file"),
        ("model-00000-of-00002 model-00001-of-00002", ""),
        ("model-1-of-2 model-2-of-2 consolidated +model-1-of-2 +model-2-of-2", ""),
        ("model consolidated", ""),
    ],
)
def test_shards_of_no_whole_save_are_refused(tmp_path: Path, names: str, match: str) -> None:
    """Names with a + are in the index, in which each has the tensor of the one that is there."""
    there = [name for name in names.split() if name[0] != "+"]
    for number, name in enumerate(there):
        save_file({f"w{number}": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    listed = [f"{name[1:]}.safetensors" for name in names.split() if name[0] == "+"]
    if listed:
        places = {f"w{number}": name for number, name in enumerate(listed)}
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    if not match:
        assert len(State.of(tmp_path)) == len([n for n in there if n != "consolidated"])
        return
    with pytest.raises((CorruptCheckpoint, InputError), match=match) as caught:
        State.of(tmp_path)
    assert ".safetensors" in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "adapter_model.bin"])
def test_a_pickled_file_is_named_as_one(tmp_path: Path, name: str) -> None:
    for legacy in (False, True):
        torch.save({"w": torch.ones(2)}, tmp_path / name, _use_new_zipfile_serialization=not legacy)
        for path in (tmp_path, tmp_path / name):
            with pytest.raises(InputError, match=f"{name}.* pickled") as caught:
                State.of(path)
            assert "save_pretrained" in caught.value.hint


def test_a_file_that_is_written_meanwhile_is_an_error(tmp_path: Path) -> None:
    """One that is cut short under a map ends the process; one of another save is other weights."""
    file = tmp_path / "model.safetensors"
    for other in (b"x" * 1000, b""):
        save_file({"w": torch.ones(1 << 20)}, file)
        state = State.of(file)
        whole = file.read_bytes()
        file.write_bytes(other or whole)
        with pytest.raises(CorruptCheckpoint, match="was written while it was read"):
            state_root(state)
    state = State.of(file)
    file.unlink()  # as by a rename in its place: what was opened stays
    assert state.read("w").view(np.float32).sum() == 1 << 20


def test_no_link_leads_out_of_a_folder(tmp_path: Path) -> None:
    sent, cache = tmp_path / "sent", tmp_path / "models--a--b"
    snapshot, blobs = cache / "snapshots" / "1", cache / "blobs"
    for folder in (sent, snapshot, blobs):
        folder.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, blobs / "abc")
    (snapshot / FILE_NAME).symlink_to("../../blobs/abc")
    assert State.of(snapshot).names == ["w"]
    (sent / FILE_NAME).symlink_to(".pulse/current/model.safetensors")
    (sent / ".pulse").mkdir()
    (sent / ".pulse" / "current").symlink_to(snapshot)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / FILE_NAME).symlink_to(blobs / "abc")
    for folder in (sent, tmp_path / "mine"):
        with pytest.raises(InputError, match="leads out of its folder"):
            State.of(folder)


@pytest.mark.parametrize("title", HOSTILE)
def test_hostile_files_are_refused(title: str, tmp_path: Path) -> None:
    """`tests/test_hostile.py` shows in how little memory."""
    unknown = title in ("unknown-dtype", "dtype-a-list")
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[title])
    with pytest.raises(UnsupportedTensor if unknown else CorruptCheckpoint) as caught:
        load(tmp_path)
    assert "model.safetensors" in str(caught.value)


@given(st.data())
def test_damaged_headers_end_in_a_typed_error_or_in_a_state(data: st.DataObject) -> None:
    header = {
        "__metadata__": {"a": "b"},
        "x": entry("F32", [2, 2], [0, 16]),
        "y": entry("U8", [3], [16, 19]),
    }
    broken = bytearray(file_of(header, bytes(19)))
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(broken[: data.draw(st.sampled_from([len(broken), len(broken) - 1, 8, 30]))])
        file.flush()
        try:
            state, _ = load(file.name)
        except (FormatError, UnsupportedTensor):  # a damaged dtype looks like one that is not known
            return
        assert state.nbytes == 19


def test_a_dtype_without_whole_bytes_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(file_of({"a": entry("F4", [2], [0, 1])}, bytes(1)))
    with pytest.raises((UnsupportedTensor, CorruptCheckpoint), match="F4"):
        load(tmp_path)


INDEXES = {
    "not JSON": "{",
    "not UTF-8": b"\xff",
    "nested too deep": "[" * 100_000,
    "a list": "[]",
    "without a map": "{}",
    "map a list": '{"weight_map": []}',
    "a number for a file": '{"weight_map": {"a": 1}}',
    "null for a file": '{"weight_map": {"a": null}}',
    "a list for a file": '{"weight_map": {"a": []}}',
    "numbers and names": '{"weight_map": {"a": 1, "b": "x.safetensors"}}',
    "no tensors": '{"weight_map": {}}',
    "parent folder": '{"weight_map": {"a": "../../x.safetensors"}}',
    "absolute path": '{"weight_map": {"a": "/etc/x.safetensors"}}',
    "inner folder": '{"weight_map": {"a": "y/x.safetensors"}}',
    "hidden file": '{"weight_map": {"a": ".x.safetensors"}}',
    "another kind of file": '{"weight_map": {"a": "x.bin"}}',
    "empty name": '{"weight_map": {"a": ""}}',
    "a tensor that its file lacks": '{"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}',
}


@pytest.mark.parametrize("text", INDEXES.values(), ids=INDEXES)
def test_hostile_indexes_are_refused(text: str | bytes, tmp_path: Path) -> None:
    """Names from an index are checked before they are joined to a path."""
    folder = tmp_path / "outer" / "inner"
    for place in (folder, tmp_path):
        save(place / "x.safetensors", State.of({"a": np.zeros(2)}))
    (folder / INDEX_NAME).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CorruptCheckpoint, match="index"):
        load(folder)


@pytest.mark.slow
def test_a_missing_shard_is_named(tmp_path: Path, qwen: Any) -> None:
    qwen.save_pretrained(tmp_path, max_shard_size="20KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises((InputError, FormatError), match=gone.name):
        load(tmp_path)


def test_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / "absent.safetensors"):
        with pytest.raises(InputError, match="no checkpoint"):
            load(path)
    (tmp_path / INDEX_NAME).write_text('{"weight_map": {"a": "x.safetensors"}}')
    with pytest.raises(InputError, match=r"x\.safetensors"):
        load(tmp_path)


def test_what_is_no_source_of_a_state() -> None:
    for wrong in (None, 3, [np.zeros(1)], torch.nn.Linear):
        with pytest.raises(InputError):
            State.of(wrong)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedTensor):
        State.of({"a": 3})


@pytest.mark.parametrize("path", [None, 3, True, b"w", [], "a\0b"], ids=repr)
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(InputError, match="path"):
        load(path)
    with pytest.raises(InputError, match="path"):
        save(path, State.of({}))


@pytest.mark.parametrize(
    "metadata", [{"step": 1}, {1: "step"}, {"loss": float("nan")}, ["step"]], ids=repr
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, metadata: Any) -> None:
    """Metadata that are no strings made a file that no reader takes, in place of the one before."""
    file = tmp_path / "w.safetensors"
    save(file, State.of({"w": np.zeros(3)}), {"step": "1"})
    before = file.read_bytes()
    with pytest.raises(InputError, match="strings to strings"):
        save(file, State.of({"w": np.ones(3)}), metadata)
    with pytest.raises(InputError, match="not a State"):
        save(file, {"w": np.ones(3)})  # type: ignore[arg-type]
    assert file.read_bytes() == before


def test_saving_replaces_the_whole_file_or_nothing(
    tmp_path: Path, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model.safetensors"
    old, new = State.of(policy(rng)), State.of(policy(rng))
    save(target, old)

    def breaks(state: State, *rest: Any) -> Iterator[bytes]:
        yield from whole(state, *rest)
        raise KeyboardInterrupt

    whole: Callable[..., Iterator[bytes]] = load.__globals__["serialize"]
    with monkeypatch.context() as patched:
        patched.setattr("pulse_rl.follow.checkpoint.serialize", breaks)
        with pytest.raises(KeyboardInterrupt):
            save(target, new)
    assert snapshot(load(target)[0]) == snapshot(old)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    before, _ = load(target)
    save(target, new)
    assert snapshot(load(target)[0]) == snapshot(new)
    assert snapshot(before) == snapshot(old), "a mapped checkpoint must survive its replacement"
