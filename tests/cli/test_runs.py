"""Commands that run a program on versions of a stream, and what they take and refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from pulse_rl import Publisher, Signer, checkout, state_root, verify_stream
from pulse_rl.errors import PublisherConflict
from tests.support.commands import Pulse


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stream of twelve versions in the folder "store"; the current folder is another one."""
    monkeypatch.chdir(tmp_path)
    weights, found = np.zeros(1000, np.uint16), []
    with Publisher("store", stream="s") as publisher:
        for version in range(12):
            weights = weights.copy()
            weights[version] = 1
            found.append(
                publisher.publish(
                    {"w": weights}, metadata={"step": 5 * version}, anchor=version == 8
                ).root
            )
    return found


def test_a_version_is_checked_out_by_what_it_says_or_is(roots: list[str], pulse: Pulse) -> None:
    command = ("checkout", "store", "--stream", "s", "--out", "out")
    for which in (("--metadata", "step=20"), ("--root", roots[4][:9]), ("--version", 4)):
        done = pulse.json(*command, *which)
        assert (done["version"], done["metadata"], done["root"]) == (4, {"step": 20}, roots[4])
        assert state_root("out") == roots[4]
    pulse.refused(
        *command, "--metadata", "step=21", kind="input", match="no version of 's' has step=21"
    )
    pulse.refused(*command, "--root", "12", kind="input", match="is not a root")


def test_an_evaluation_goes_on_from_its_log_and_is_drawn(roots: list[str], pulse: Pulse) -> None:
    def command(*program: str) -> list[object]:
        return ["evaluate", "store", "--stream", "s", "--every", 5, "--", *program]

    script = """echo $PULSE_VERSION >> asked; echo talk; echo '{"reward": 0.'$PULSE_VERSION', "name": "x"}'"""  # noqa: E501
    failing = (
        f"[ $PULSE_VERSION != 10 ] || [ -e repaired ] || exit 3; {script}; cat "
        '"$0"/*.safetensors > /dev/null'
    )
    pulse(*command("sh", "-c", failing), status=1)
    assert "status 3 on version 10" in pulse.err
    Path("repaired").touch()
    lines = pulse(*command("sh", "-c", failing)).splitlines()
    assert lines == [
        "version 0: reward=0",
        "version 5: reward=0.5",
        "version 10: reward=0.1",
        "version 11: reward=0.11",
    ]
    assert Path("asked").read_text().split() == ["0", "5", "10", "11"]
    assert "talk" in pulse.err
    logged = [json.loads(line) for line in Path("events-evaluate.jsonl").read_text().splitlines()]
    assert [(each["version"], each["root"]) for each in logged] == [
        (v, roots[v]) for v in (0, 5, 10, 11)
    ]
    pulse("report", "events-evaluate.jsonl", "-o", "page.html")
    assert "<figcaption>reward</figcaption>" in Path("page.html").read_text()
    # Another program is asked anew.
    pulse(*command("sh", "-c", script))
    assert len(Path("asked").read_text().split()) == 8


def test_two_commands_do_not_share_a_folder(roots: list[str], pulse: Pulse) -> None:
    """The program of an evaluation runs other commands on the folder that it is given."""
    other = [sys.executable, "-c", "import sys; from pulse_rl.cli import main; sys.exit(main())"]
    of = ["store", "--stream", "s", "--out", "out"]
    commands = (
        ["checkout", *of, "--version", "7"],
        ["follow", *of, "--once"],
        ["evaluate", *of, "--every", "3", "--log", "other.jsonl", "--", "true"],
    )
    program = (
        "import json, subprocess\n"
        f"done = [subprocess.run({other!r} + more, capture_output=True) for more in {commands!r}]\n"
        "assert all(b'another command uses' in each.stderr for each in done), done\n"
        "print(len(done))"
    )
    pulse("evaluate", *of, "--every", 100, "--", sys.executable, "-c", program)
    assert state_root("out") == roots[-1]


def test_a_bisection_goes_around_what_is_skipped_or_gone(roots: list[str], pulse: Pulse) -> None:
    next(Path("store/s/versions").glob("*006*")).unlink()
    script = "case $PULSE_VERSION in 4|5) exit 125;; esac; [ $PULSE_VERSION -lt 9 ]"
    command = ["bisect", "store", "--stream", "s", "--good", 1, "--bad", 11]
    *asked, last = map(json.loads, pulse(*command, "--json", "--", "sh", "-c", script).splitlines())
    assert last["first_bad"] == 9
    assert {each["version"] for each in asked if each["verdict"] == "skipped"} <= {4, 5, 7}
    assert asked[0] == asked[0] | {"version": 7, "verdict": "skipped"}  # no path leads to it
    pulse(*command, "--", "sh", "-c", "[ $PULSE_VERSION = 11 ] && exit 1 || exit 125", status=1)
    assert pulse.out.splitlines()[-1].startswith("the first bad version is one of 2, 3, 4,")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--good", 3, "--bad", 3, "--", "true"), "is not before"),
        (("--good", 3, "--bad", 12, "--", "true"), "no version 12"),
        (("--good", 0, "--bad", 11, "--", "no-such-program"), "cannot run no-such-program"),
        (
            ("--good", 0, "--bad", 11, "--", "sh", "-c", "kill -9 $$"),
            "ended with signal 9 on version",
        ),
        (
            ("--good", 0, "--bad", 11, "--", "sh", "-c", "exit 130"),
            "ended with status 130 on version",
        ),
    ],
)
def test_what_says_nothing_of_a_version_ends_a_bisection(
    roots: list[str], pulse: Pulse, arguments: tuple[object, ...], match: str
) -> None:
    pulse("bisect", "store", "--stream", "s", *arguments, status=1)
    assert match in pulse.err
    assert pulse.err.rstrip().endswith(")")  # its hint


def test_a_stream_begins_with_a_version_of_another(roots: list[str], pulse: Pulse) -> None:
    with Publisher("store", stream="parent") as parent:
        done = parent.publish(
            {"w": np.arange(9.0)}, metadata={"step": 3, "who": "p"}, files={"config.json": b"{}"}
        )
    key = Signer.generate()
    with (
        checkout("store", "parent") as found,
        Publisher("store", stream="child", signer=key) as child,
    ):
        begun = child.begin_from(found, metadata={"who": "c"})
        with pytest.raises(PublisherConflict):
            child.begin_from(found)
        assert child.publish({"w": np.arange(9.0) + (np.arange(9) == 4)}).changed == 1
    assert begun.root == done.root
    assert begun.metadata == {"step": 3, "who": "c", "begun_from": f"parent@0 {done.stream_id}"}
    with checkout("store", "child", version=0, trusted_keys=[key.public_key]) as found:
        assert (found.root, found.files()) == (done.root, {"config.json": b"{}"})
    assert "begun_from=parent@0" in pulse("log", "store", "--stream", "child")
    assert all(report.ok for report in verify_stream("store", "child"))
    with Publisher("store", stream="liar") as liar:
        liar.publish({"w": np.arange(8.0)}, metadata=begun.metadata)
    (lie,) = verify_stream("store", "liar")
    assert "another root" in lie.problems[0]


def test_a_patch_between_any_two_versions_or_checkpoints(roots: list[str], pulse: Pulse) -> None:
    pulse("checkout", "store", "--stream", "s", "--version", 2, "--out", "two")
    pulse("publish", "store#s@step=50", "other", "--stream", "branch")
    made = pulse.json("diff", "two", "other#branch", "-o", "P")
    assert (made["base_root"], made["target_root"], made["changed"]) == (roots[2], roots[10], 8)
    assert (
        pulse.json("apply", "store#s@2", "P", "-o", "ten")["root"] == state_root("ten") == roots[10]
    )
    assert pulse.json("digest", "store#s@11")["root"] == roots[11]
    pulse("inspect", "P", "--base", "store#s@2")
    pulse.refused(
        "apply", "store#s@3", "P", "-o", "out", kind="wrong_base", match="applies to root"
    )
    pulse.refused("digest", "store#s@12", kind="input", match="it has 0 to 11")
    pulse.refused("digest", "store#s@x", kind="input", match="names no version")
    publish = ("publish", "store#s@1", "new", "--stream", "s", "--dtype", "BF16")
    pulse.refused(*publish, kind="input", match="as it is")
