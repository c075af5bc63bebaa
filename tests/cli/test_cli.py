"""The command line: results on stdout, one readable line with a hint for every error, and exit
codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pulse_rl import LocalStore, Publisher, State, __version__, state_root
from pulse_rl.cli import main
from pulse_rl.errors import InputError, PulseError
from tests.support.checkpoints import write_checkpoint
from tests.support.commands import POLICY, Pulse, at_waits
from tests.support.states import (
    Rng,
    Tensors,
    history,
    mutated,
    policy,
    publish_each,
    roots,
    snapshot,
)


@pytest.fixture
def pair(tmp_path: Path, rng: Rng) -> tuple[Path, Path]:
    """Two checkpoints: a file and a folder."""
    states = history(rng, 2)
    return write_checkpoint(tmp_path / "old.safetensors", states[0]), write_checkpoint(
        tmp_path / "new", states[1]
    )


DIFF_KEYS = "elements changed density dense_bytes patch_bytes ratio bytes_per_changed seconds"


def test_diff_and_apply_give_back_the_second_checkpoint(
    pulse: Pulse, pair: Any, tmp_path: Path
) -> None:
    old, new = pair
    facts = pulse.json("diff", old, new, "-o", tmp_path / "p.patch")
    assert set(DIFF_KEYS.split()) <= facts.keys()
    state = State.of(old)
    assert (facts["elements"], facts["dense_bytes"]) == (state.elements, state.nbytes)
    assert facts["patch_bytes"] == (tmp_path / "p.patch").stat().st_size
    assert facts["density"] == facts["changed"] / facts["elements"]
    assert facts["ratio"] == facts["dense_bytes"] / facts["patch_bytes"]
    assert facts["bytes_per_changed"] == facts["patch_bytes"] / facts["changed"]
    assert facts["seconds"] > 0
    done = pulse.json("apply", old, tmp_path / "p.patch", "-o", tmp_path / "out")
    assert done["root"] == state_root(new)
    assert done["changed"] == facts["changed"]
    assert snapshot(State.of(tmp_path / "out")) == snapshot(State.of(new))
    load_file(tmp_path / "out" / "model.safetensors")
    pulse("apply", old, tmp_path / "p.patch", "-o", tmp_path / "out.safetensors")
    assert snapshot(State.of(tmp_path / "out.safetensors")) == snapshot(State.of(new))
    assert snapshot(State.of(old)) == snapshot(state)


def test_applying_onto_the_base_itself_replaces_it(pulse: Pulse, pair: Any, tmp_path: Path) -> None:
    old, new = pair
    pulse("diff", old, new, "-o", tmp_path / "p")
    apply = ("apply", old, tmp_path / "p", "-o", old)
    pulse.refused(*apply, kind="input", match="was not written by this command")
    pulse("apply", old, tmp_path / "p", "-o", old, "--force")
    assert state_root(old) == state_root(new)
    pulse.refused(
        "apply", old, tmp_path / "p", "-o", old, kind="wrong_base", match="applies to root"
    )
    assert state_root(old) == state_root(new)


def test_readable_output(pulse: Pulse, pair: Any, tmp_path: Path) -> None:
    old, new = pair
    text = pulse("diff", old, new, "-o", tmp_path / "p")
    assert "times smaller" in text
    assert state_root(old) in text
    assert state_root(new) in text
    assert pulse("digest", old).startswith(state_root(old))
    assert state_root(new) in pulse("apply", old, tmp_path / "p", "-o", tmp_path / "out")
    assert "embed.weight" in pulse("inspect", tmp_path / "p", "--base", pair[0])
    assert pulse.err == "", "no progress bar without a terminal"


def test_a_diff_of_equal_checkpoints(pulse: Pulse, pair: Any, tmp_path: Path) -> None:
    facts = pulse.json("diff", pair[0], pair[0], "-o", tmp_path / "p")
    assert (facts["changed"], facts["density"], facts["bytes_per_changed"]) == (0, 0, None)
    pulse("apply", pair[0], tmp_path / "p", "-o", tmp_path / "out")
    assert state_root(tmp_path / "out") == state_root(pair[0])


def test_inspect_tells_what_a_patch_holds(pulse: Pulse, pair: Any, tmp_path: Path) -> None:
    made = pulse.json("diff", *pair, "-o", tmp_path / "p")
    alone = pulse.json("inspect", tmp_path / "p")
    facts = pulse.json("inspect", tmp_path / "p", "--base", pair[0])
    shared = (set(DIFF_KEYS.split()) | {"base_root", "target_root"}) - {"seconds"}
    assert {k: facts[k] for k in shared} == {k: made[k] for k in shared}
    assert all("tensors" in b for b in facts["blocks"])
    assert (alone["changed"], alone["elements"]) == (facts["changed"], facts["elements"])
    assert [(b["changed"], b["bytes"]) for b in alone["blocks"]] == [
        (b["changed"], b["bytes"]) for b in facts["blocks"]
    ]
    assert alone["ratio"] is alone["dense_bytes"] is None
    assert sum(b["changed"] for b in facts["blocks"]) == facts["changed"]
    assert sum(b["elements"] for b in facts["blocks"]) == facts["elements"]
    codecs = {"same", "raw", "zstd", "sparse", "table", "history", "gaps"}
    assert {b["codec"] for b in facts["blocks"]} <= codecs


def test_digest(pulse: Pulse, pair: Any, tmp_path: Path) -> None:
    facts = pulse.json("digest", pair[0])
    assert facts["root"] == state_root(pair[0])
    assert sorted(facts["tensors"]) == State.of(pair[0]).names
    text = pulse("digest", pair[0], "--tensors", "--threads", 1)
    assert all(digest in text for digest in facts["tensors"].values())


def test_publish_follow_and_verify(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    states, store, out = history(rng, 3), tmp_path / "store", tmp_path / "out"
    for version, state in enumerate(states):
        write_checkpoint(tmp_path, state)
        done = pulse.json("publish", tmp_path / "model.safetensors", store, "--stream", "policy")
        assert (done["version"], done["root"]) == (version, state_root(state))
        assert (done["changed"] is None) == (version == 0)
        assert (done["density"] == 1) == (version == 0)
        assert (done["ratio"] < 1) == (version == 0)
        seen = pulse.json("follow", store, "--stream", "policy", "--out", out, "--once")
        assert (seen["version"], seen["root"]) == (version, state_root(state))
        assert state_root(out) == state_root(state)
        if version:
            assert (seen["previous"], seen["changed"]) == (version - 1, done["changed"])
            assert seen["payload_bytes"] == done["patch_bytes"], (
                "it resumes from its folder, not from the anchor"
            )
    idle = pulse.json("follow", store, "--stream", "policy", "--out", out, "--once")
    assert (idle["version"], idle["changed"], idle["payload_bytes"]) == (2, 0, 0)
    assert pulse.json("verify", store, "--stream", "policy") == {
        "stream": "policy",
        "versions": 3,
        "ok": True,
        "problems": [],
    }
    assert "3 versions of policy verified: all links are valid" in pulse(
        "verify", store, "--stream", "policy"
    )
    assert sorted(p.name for p in out.iterdir()) == [".pulse", "model.safetensors"]


def stream(store: Path, states: list[Tensors]) -> None:
    publish_each(Publisher(LocalStore(store), stream="policy"), states)


def flip_first_byte(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def spoil_dtype(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"BF16", b"BF17"))


@pytest.mark.parametrize("damage", [flip_first_byte, cut, spoil_dtype])
def test_follow_replaces_a_damaged_folder(
    pulse: Pulse, tmp_path: Path, rng: Rng, damage: Callable[[Path], None]
) -> None:
    states = history(rng, 2)
    stream(tmp_path / "store", states)
    pulse("follow", tmp_path / "store", "--stream", "policy", "--out", tmp_path / "out", "--once")
    damage(tmp_path / "out" / "model.safetensors")
    seen = pulse.json(
        "follow", tmp_path / "store", "--stream", "policy", "--out", tmp_path / "out", "--once"
    )
    assert seen["previous"] is None
    assert state_root(tmp_path / "out") == state_root(states[1])


def test_verify_finds_a_damaged_payload(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    stream(tmp_path / "store", history(rng, 3))
    patches = sorted(
        (tmp_path / "store" / "policy" / "payloads").glob("*.patch"),
        key=lambda p: p.stat().st_mtime_ns,
    )
    flip_first_byte(patches[-1])
    found = pulse.json("verify", tmp_path / "store", "--stream", "policy", status=1)
    assert (found["ok"], found["versions"]) == (False, 3)
    assert [p["version"] for p in found["problems"]] == [2]
    assert patches[-1].name in found["problems"][0]["problem"]
    text = pulse("verify", tmp_path / "store", "--stream", "policy", status=1)
    assert "version 2:" in text
    assert "verified: 1 problem\n" in text


def test_errors_are_one_line_with_a_hint(pulse: Pulse, pair: Any, tmp_path: Path, rng: Rng) -> None:
    old, new = pair
    pulse("diff", old, new, "-o", tmp_path / "p")
    (tmp_path / "junk.safetensors").write_bytes(b"junk" * 10)
    (tmp_path / "cut").write_bytes((tmp_path / "p").read_bytes()[:-1])
    (tmp_path / "file").write_bytes(b"")
    write_checkpoint(
        tmp_path / "other.safetensors", {n: t for n, t in policy(rng).items() if n != "steps"}
    )
    out, absent = tmp_path / "out", tmp_path / "absent"
    cases: list[tuple[tuple[Any, ...], str, str]] = [
        (("digest", absent), "input", "absent"),
        (("digest", tmp_path / "junk.safetensors"), "corrupt_checkpoint", "junk.safetensors"),
        (("diff", old, absent, "-o", out), "input", "absent"),
        (("diff", old, tmp_path / "other.safetensors", "-o", out), "state_mismatch", "steps"),
        (("diff", old, new, "-o", tmp_path / "file" / "p"), "store", "file"),
        (("diff", old, new, "-o", tmp_path / "new"), "input", "new"),
        (("apply", old, tmp_path / "cut", "-o", out), "corrupt_patch", "cut"),
        (("apply", new, tmp_path / "p", "-o", out), "wrong_base", "applies to root"),
        (("apply", old, absent, "-o", out), "input", "absent"),
        (("apply", old, tmp_path, "-o", out), "input", str(tmp_path)),
        (("inspect", old), "corrupt_patch", "magic"),
        (("publish", old, tmp_path / "file", "--stream", "s"), "store", "file"),
        (("publish", old, "ftp://x", "--stream", "s"), "input", "ftp://x"),
        (("publish", old, tmp_path / "store", "--stream", "../s"), "input", "../s"),
        (
            ("follow", tmp_path / "store", "--stream", "s", "--out", out, "--once"),
            "empty_stream",
            "'s'",
        ),
        (("verify", tmp_path / "store", "--stream", "s"), "empty_stream", "'s'"),
    ]
    for args, kind, match in cases:
        pulse.refused(*args, kind=kind, match=match)
    assert not out.exists()


def test_sharded_folders_are_not_written_into(
    pulse: Pulse, pair: Any, tmp_path: Path, rng: Rng
) -> None:
    """model.safetensors beside an index would never be read."""
    stream(tmp_path / "store", history(rng, 1))
    pulse("diff", *pair, "-o", tmp_path / "p")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors.index.json").write_text("{}")
    out = tmp_path / "out"
    pulse.refused("apply", pair[0], tmp_path / "p", "-o", out, kind="input", match="sharded")
    pulse.refused(
        "follow", tmp_path / "store", *POLICY, "--out", out, "--once", kind="input", match="sharded"
    )


@pytest.mark.parametrize(
    "args",
    [
        ["nothing"],
        ["diff", "a", "b"],
        ["digest", "x", "--threads", "0"],
        ["publish", "a", "b"],
        ["diff", "a", "b", "-o", "p", "--unknown"],
    ],
)
def test_wrong_usage_is_status_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert "usage: pulse" in capsys.readouterr().err


def test_follow_goes_on_until_it_is_interrupted(
    pulse: Pulse, tmp_path: Path, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = history(rng, 3)
    publisher = Publisher(LocalStore(tmp_path / "store"), stream="policy")
    waits = at_waits(monkeypatch, *(partial(publisher.publish, state) for state in states))
    out = tmp_path / "out"
    text = pulse(
        "follow", tmp_path / "store", *POLICY, "--out", out, "--poll", 0.5, "--json", status=130
    )
    assert [json.loads(line)["root"] for line in text.splitlines()] == roots(states)
    assert "interrupted" in pulse.err
    assert waits == pytest.approx([0.5] * 4, rel=0.25)
    assert state_root(out) == state_root(states[2])


@pytest.mark.slow
def test_the_installed_command(tmp_path: Path, pair: Any) -> None:
    command = shutil.which("pulse", path=str(Path(sys.executable).parent))
    assert command is not None, "the package must be installed with its command"

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *map(str, args)], capture_output=True, text=True, timeout=30, check=False
        )

    assert run("--version").stdout == f"pulse {__version__}\n"
    done = run("diff", *pair, "-o", tmp_path / "p", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["target_root"] == state_root(pair[1])
    wrong = run("apply", pair[1], tmp_path / "p", "-o", tmp_path / "out")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (1, "", 1)
    assert "Traceback" not in wrong.stderr


def test_a_change_of_tensors_is_followed(pulse: Pulse, tmp_path: Path, rng: Rng) -> None:
    states = history(rng, 2)
    states.append({n: t for n, t in mutated(rng, states[1]).items() if n != "steps"})
    for state in states:
        write_checkpoint(tmp_path / "m.safetensors", state)
        pulse("publish", tmp_path / "m.safetensors", tmp_path / "store", "--stream", "policy")
        pulse(
            "follow", tmp_path / "store", "--stream", "policy", "--out", tmp_path / "out", "--once"
        )
        assert state_root(tmp_path / "out") == state_root(state)


def test_no_control_character_reaches_the_terminal() -> None:
    escape = "\x1b]0;owned\x07\u202e"
    for error in (InputError(escape, hint=escape), PulseError("a\nb" + escape)):
        for text in (str(error), error.hint, *error.__notes__):
            assert not set(escape[:1] + escape[-2:]) & set(text)
    assert str(error).startswith("a\nb\\x1b]0;owned")
