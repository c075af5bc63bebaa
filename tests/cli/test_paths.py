"""What commands write over, and what they read from: nothing is lost, and nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse_rl import LocalStore, MemoryStore, Publisher, PulseError, Signer, Subscriber
from pulse_rl.metrics import JsonLines
from pulse_rl.stores.server import FolderServer
from pulse_rl.study import study
from tests.support.checkpoints import write_checkpoint
from tests.support.commands import POLICY, Pulse
from tests.support.states import Rng, history, mutated, policy

UNREADABLE = b"\x28" + b"\0" * 7 + b'{"w":{"dtype":"C128"'
NOT_OURS = "was not written by this command"


def pulse_process(
    *args: object, ascii_only: bool = False, **streams: object
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"PYTHONIOENCODING": "ascii"} if ascii_only else {})
    command = [
        sys.executable,
        "-c",
        "import sys; from pulse_rl_command import main; sys.exit(main())",
    ]
    options = streams or {"capture_output": True}
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [*command, *map(str, args)], text=True, timeout=60, env=environment, check=False, **options
    )


@pytest.fixture
def steps(tmp_path: Path, rng: Rng) -> Path:
    """A folder of two checkpoints."""
    state = policy(rng)
    for k in range(2):
        write_checkpoint(tmp_path / f"steps/{k}.safetensors", state)
        state = mutated(rng, state)
    return tmp_path / "steps"


@pytest.mark.slow
def test_no_command_replaces_what_it_did_not_write(
    pulse: Pulse, tmp_path: Path, steps: Path, rng: Rng
) -> None:
    old = steps / "0.safetensors"
    new = steps / "1.safetensors"
    patch = tmp_path / "p"
    page = tmp_path / "page.html"
    Publisher(LocalStore(tmp_path / "store"), stream="policy").publish(history(rng, 1)[0])
    study = tmp_path / "study.json"
    study.write_text(pulse("study", steps, "--k", "1", "--json"))
    pulse("diff", old, new, "-o", patch)
    mine = tmp_path / "mine/model.safetensors"
    mine.parent.mkdir()
    commands: list[tuple[Path, tuple[object, ...], tuple[object, ...]]] = [
        (tmp_path / "out/patch", ("diff", old, new), ("-o",)),
        (tmp_path / "out/m.safetensors", ("apply", old, patch), ("-o",)),
        (tmp_path / "out/page.html", ("study", steps, "--k", "1"), ("-o",)),
        (tmp_path / "out/page2.html", ("report", study), ("-o",)),
    ]
    own: dict[str, bytes] = {}  # what another command has made
    for out, command, option in [*commands, commands[0]]:
        pulse(*command, *option, out)
        pulse(*command, *option, out)  # what it wrote itself it replaces
        own[out.suffix] = out.read_bytes()
        for foreign in (
            b"x" * 5000,
            b"",
            old.read_bytes(),
            old.read_bytes()[:50],
            UNREADABLE,
            *(other for kind, other in own.items() if kind != out.suffix),
        ):
            out.write_bytes(foreign)
            pulse.refused(*command, *option, out, kind="input", match=NOT_OURS)
            assert out.read_bytes() == foreign
        pulse(*command, *option, out, "--force")
        assert out.read_bytes() != foreign
        pulse.refused(
            *command, *option, tmp_path / ("x" * 300), kind="input", match="File name too long"
        )
    follow = ("follow", tmp_path / "store", "--stream", "policy", "--once", "--out")
    for foreign in (b"", b"x" * 50, new.read_bytes()[:-1], UNREADABLE):
        mine.write_bytes(foreign)
        pulse.refused(*follow, mine.parent, kind="input", match=NOT_OURS)
        assert mine.read_bytes() == foreign
    pulse.refused(*follow, tmp_path / ("x" * 300), kind="input", match="File name too long")
    pulse(*follow, mine.parent, "--force")
    mine.write_bytes(mine.read_bytes()[:-1])  # its own, damaged
    pulse(*follow, mine.parent)
    pulse.refused("study", steps, "--k", "1", "-o", new, kind="input", match=NOT_OURS)
    pulse.refused("report", study, "-o", study, kind="input", match=NOT_OURS)
    pulse("report", study, "-o", page)


def test_inputs_that_may_never_end_are_refused_at_once(pulse: Pulse, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    page = tmp_path / "page.html"
    plan = ("plan", "--step-seconds", "1", "--bandwidth", "1Gbit", "--study")
    for command in (
        *(("inspect", path) for path in (fifo, "/dev/zero", tmp_path)),
        *(("report", path, "-o", page) for path in (fifo, "/dev/zero")),
        *((*plan, path) for path in (fifo, "/dev/zero", tmp_path / "missing")),
    ):
        pulse.refused(*command, kind="input", match="cannot read")
    pulse.refused("digest", fifo, kind="input", match="no checkpoint")


def test_a_fifo_in_a_folder_is_no_input_either(pulse: Pulse, tmp_path: Path, steps: Path) -> None:
    names = ("model.safetensors", "events-trainer.jsonl")
    for name in names:
        (tmp_path / name).mkdir()
        os.mkfifo(tmp_path / name / name)
    pulse.refused("digest", tmp_path / names[0], kind="input", match="not a regular file")
    report = ("report", tmp_path / names[1], "-o", tmp_path / "p")
    pulse.refused(*report, kind="input", match="not a regular file")
    publish = ("publish", steps / "0.safetensors", tmp_path / "store", *POLICY, "--sign-key")
    for key in (tmp_path / names[0] / names[0], "/dev/zero"):
        pulse.refused(
            *publish, key, kind="input", match="not a private key: it is not a regular file"
        )


def test_a_name_that_no_file_can_have_is_said_as_any_other_error(
    pulse: Pulse, tmp_path: Path, steps: Path
) -> None:
    long = tmp_path / ("x" * 300)
    Publisher(LocalStore(tmp_path / "store"), stream="policy").publish(
        {"w": np.zeros(3, np.float32)}
    )
    follow = ("follow", tmp_path / "store", *POLICY, "--once", "--out", tmp_path / "out", "--cache")
    for command in (
        ("store-check", long),
        ("report", long, "-o", tmp_path / "page"),
        ("serve", long),
        (*follow, long),
        ("inspect", long),
        (
            "publish",
            steps / "0.safetensors",
            tmp_path / "store",
            "--stream",
            "p",
            "--sign-key",
            long,
        ),
    ):
        pulse.refused(*command, kind="input", match="File name too long")


@pytest.mark.slow
def test_what_an_output_cannot_take_is_said_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write_checkpoint(file, {"gewicht-é\U0001f600": np.zeros(3, np.float32)})
    shown = pulse_process("digest", file, "--tensors", ascii_only=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "gewicht-\\xe9\\U0001f600" in shown.stdout
    with Path("/dev/full").open("w") as full:
        refused = pulse_process("digest", file, stdout=full, stderr=subprocess.PIPE)
    assert refused.returncode == 1
    assert refused.stderr == "pulse: No space left on device (Check the output.)\n"


@pytest.mark.slow
def test_a_closed_standard_error_does_not_stop_a_command(tmp_path: Path) -> None:
    Publisher(LocalStore(tmp_path / "store"), stream="policy").publish(
        {"w": np.zeros(3, np.float32)}
    )
    verify = f"verify {tmp_path}/store --stream policy"
    for command in (verify, f"digest {tmp_path}/missing"):
        program = (
            f"{sys.executable} -c 'from pulse_rl_command import main; exit(main())' {command} 2>&-"
        )
        done = subprocess.run(
            ["sh", "-c", program], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == ("missing" in command)
        assert bool(done.stdout) == ("missing" not in command)


@pytest.mark.slow
def test_a_full_disk_leaves_no_empty_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    program = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    program += (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\nfrom pulse_rl.cli import "
        "main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "keygen", str(key)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "no space left" in done.stderr
    assert not key.exists()


@pytest.mark.parametrize("path", ["x" * 300, "x/" * 3000, "a\0b"])
def test_a_path_that_no_disk_can_have_is_an_input_error(
    path: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    store, state = MemoryStore(), {"w": np.zeros(3, np.int8)}
    with Publisher(store, stream="s") as publisher:
        publisher.publish(state)
        worker = Subscriber(store, stream="s")
        worker.sync()
        calls: list[Callable[[], object]] = [
            lambda: LocalStore(path),
            lambda: FolderServer(path),
            lambda: Subscriber(store, stream="s", cache=path).sync(),
            lambda: Subscriber(store, stream="s", base=path).sync(),
            lambda: worker.save(path),
            lambda: worker.save(f"{path}.safetensors"),
            lambda: publisher.publish(path),
            lambda: publisher.publish(state, files=path),
            lambda: publisher.publish(state, files={"a.json": path}),
            lambda: Signer.load(path),
            lambda: Signer.generate().save(path),
            lambda: JsonLines(path),
            lambda: study(path),
        ]
        for call in calls:
            with pytest.raises(PulseError):
                call()
