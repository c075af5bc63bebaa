"""What commands share: their options and what arguments are read as; one JSON object or readable
lines on stdout, progress and errors on stderr; no output file replaces what Pulse did not write."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .._util.files import write_atomically
from .._util.settings import parse_seconds
from ..errors import InputError, PulseError
from ..events import (
    BaselineRestored,
    CallFailed,
    Event,
    FallbackUsed,
    Hint,
    Listener,
    Progress,
    ProgressBars,
    Published,
)
from ..follow.folder import check_file
from ..quantize.formats import FORMATS
from ..state.cast import compute_dtype_named
from ..store import Store, open_store
from ..stream.signing import Signer

_MAX_SECONDS = 1e9
# Of one kind of what cannot be used. A stranger's thousand junk objects are not a thousand lines.
_NOTED_OF_A_KIND, _COUNT_SECONDS = 3, 60.0
A_CHECKPOINT = "a .safetensors file, a folder, or a version of a stream, STORE#STREAM@VERSION"
READABLE = "a folder, or a file://, hf://, http://, s3://, gs:// or az:// URL"


# -- options


def options(*parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A parser that serves as a parent of others."""
    return argparse.ArgumentParser(add_help=False, parents=parents)


def _whole(text: str, what: str, least: int = 0, most: float = math.inf) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


def count(text: str) -> int:
    return _whole(text, "a positive integer", least=1)


AS_JSON = options()
AS_JSON.add_argument("--json", action="store_true", help="print JSON")
COMMON = options(AS_JSON)
_text = "number of threads (default: one per core)"
COMMON.add_argument("--threads", type=count, default=None, metavar="N", help=_text)
WRITING = options()
_text = "replace the output even if it is something else"
WRITING.add_argument("--force", action="store_true", help=_text)
LAYOUT = options()
_text = "write the weights in the files of the checkpoint's index, or else in files of 5 GB"
LAYOUT.add_argument("--sharded", action="store_true", help=_text)
NAMED = options()
NAMED.add_argument("--stream", required=True, metavar="S", help="the stream's name in the store")
STREAM = options(NAMED)
_text = "a folder, or a file://, hf://, s3://, gs:// or az:// URL; http:// to read"
STREAM.add_argument("store", metavar="STORE", help=_text)
KEYS = options()
_text = "accept only versions signed by this public key; may be repeated"
KEYS.add_argument("--trust", action="append", metavar="KEY", help=_text)
TRUST = options(KEYS)
_text = "accept only versions of the stream with this ID"
TRUST.add_argument("--stream-id", metavar="ID", help=_text)
SIGNING = options()
_text = "sign with this private key (see keygen)"
SIGNING.add_argument("--sign-key", metavar="FILE", help=_text)


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace, Console], int | None],
    *parents: argparse.ArgumentParser,
    timed: bool = False,
) -> argparse.ArgumentParser:
    """Add the command ``name`` to ``commands``, argparse's sub-parsers. ``run`` returns the exit
    status, None for 0. Its docstring is the help: what it does, and after an empty line an
    example. ``timed``: what it prints begins with the time."""
    text, _, example = (inspect.getdoc(run) or "").partition("\n\n")
    text = " ".join(text.split()).removesuffix(".")
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        parents=parents,
        help=text[:1].lower() + text[1:],
        epilog=f"example: {' '.join(example.split())}",
    )
    command.set_defaults(run=run, timed=timed)
    return command


def add_poll(command: argparse.ArgumentParser, what: str, once: str) -> None:
    command.add_argument("--once", action="store_true", help=f"{once}, then exit")
    text = f"seconds between {what} (default: 1)"
    command.add_argument("--poll", type=seconds, default=1.0, metavar="SECONDS", help=text)


def add_file_to_write(
    command: argparse.ArgumentParser, metavar: str, text: str, *, required: bool = True
) -> None:
    command.add_argument("-o", "--output", type=path, required=required, metavar=metavar, help=text)


def add_metadata(command: Any, text: str) -> None:
    text = f"{text}; may be repeated"
    command.add_argument("--metadata", type=fact, action="append", metavar="KEY=VALUE", help=text)


def add_quantize(command: argparse.ArgumentParser, text: str) -> None:
    text = text.format(formats=", ".join(FORMATS))
    command.add_argument("--quantize", type=quantization, metavar="FORMAT", help=text)


# -- arguments


def number(text: str) -> int:
    return _whole(text, "a whole number of at least 0")


def port(text: str) -> int:
    return _whole(text, "a port", most=(1 << 16) - 1)


def path(text: str) -> str:
    if not text:  # of a shell variable that is not set; it would be the current folder
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def seconds(text: str) -> float:
    try:
        value = parse_seconds(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(f"{error}: {error.hint}") from None
    if value > _MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than a run")
    return value


def fact(text: str) -> tuple[str, str | int | float | bool]:
    """KEY=VALUE of a version's metadata: a number or true or false where the value is spelled
    so."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    if value in ("true", "false"):
        return key, value == "true"
    for read in (int, float):
        try:
            return key, read(value)
        except ValueError:
            pass
    return key, value


def compute_dtype(text: str) -> str:
    """The safetensors name of a compute dtype."""
    try:
        return compute_dtype_named(text).name
    except InputError as error:
        raise argparse.ArgumentTypeError(f"{error}. {error.hint}") from None


def quantization(text: str) -> str | dict[str, Any]:
    """A format's name, or the ``quantization_config`` of a model's config.json."""
    if text in FORMATS:
        return text
    try:
        config = json.loads(Path(text).read_bytes())["quantization_config"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(FORMATS)}, and no config.json of a quantized model "
            f"({error})"
        ) from None
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f"the quantization_config of {text!r} is no object")
    return config


# -- streams


def open_lasting(address: str) -> Store:
    """The store at an address that outlives the command; raises InputError for another."""
    if address.startswith("memory:"):
        raise InputError(
            "a memory:// store is lost when the command ends",
            hint="Give a folder or an object store.",
        )
    return open_store(address)


def signer_of(args: argparse.Namespace) -> Signer | None:
    return Signer.load(args.sign_key) if args.sign_key else None


def reading(args: argparse.Namespace, listener: Listener) -> dict[str, Any]:
    """What the library's functions on a stream are given by every command."""
    return {
        "trusted_keys": args.trust,
        "stream_id": args.stream_id,
        "threads": args.threads,
        "on_event": listener,
    }


# -- output


def open_streams() -> None:
    """Lets standard output and error take any text. A stream that the caller closed, as some
    daemons do, leads nowhere; characters that an ASCII output lacks are escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the process's life
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Console:
    """One command's output. A progress bar shows only on a terminal, and only for work that takes a
    while."""

    def __init__(self, as_json: bool, *, timed: bool = False) -> None:
        self._as_json = as_json
        self._timed = timed
        self._bars = ProgressBars(disable=None)
        self._noted: set[str] = set()
        self._noted_for_good: set[str] = set()
        #: By kind of error: how often something could not be used since the last success, and how
        #: many of these were counted and not printed.
        self._fallbacks = Counter[str]()
        self._counted = Counter[str]()
        self._next_count = 0.0

    def result(self, facts: dict[str, Any], *lines: str) -> None:
        """The outcome: ``facts`` with --json, else ``lines``."""
        self._bars.close()
        if self._as_json:
            self._print_json(facts)
        else:
            print("\n".join(f"{self._now()}{_printable(line)}" for line in lines), flush=True)

    def error(self, error: PulseError) -> None:
        self._bars.close()
        if self._as_json:
            self._print_json({"error": error.kind, "message": str(error), "hint": error.hint})
        self.say(f"{error} ({error.hint})")

    def _print_json(self, facts: dict[str, Any]) -> None:
        when = {"time": round(time.time(), 3)} if self._timed else {}
        print(json.dumps(facts | when), flush=True)

    def say(self, text: str) -> None:
        """Prints a line on stderr."""
        text = _printable(" ".join(text.split()))
        print(f"{self._now()}pulse: {text}", file=sys.stderr, flush=True)

    def _now(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ ", time.gmtime()) if self._timed else ""

    def __call__(self, event: Event) -> None:
        """Listens to the library's events."""
        match event:
            case Progress():
                self._bars(event)
            case FallbackUsed():
                self._fall_back(event)
            case CallFailed(call="heartbeat"):
                self.note(f"the workers' heartbeats are not forwarded: {event.reason}")
            case BaselineRestored(how="anchored"):
                self.note(
                    f"version {event.version} could not be restored, starting over with an anchor: "
                    f"{event.reason}"
                )
            case Hint() if event.kind != "no_stream":  # which is an error where it counts
                self.note(f"{event.reason} ({event.hint})")

    def note(self, text: str) -> None:
        """Prints a line on stderr, unless it was printed since `forget_notes`: what is tried again
        fails again."""
        if text in self._noted:
            return
        self._noted.add(text)
        self._bars.close()
        self.say(text)

    def _fall_back(self, event: FallbackUsed) -> None:
        """Notes what could not be used: three of a kind one by one, and the count of the others
        each minute."""
        self._fallbacks[event.kind] += 1
        if self._fallbacks[event.kind] <= _NOTED_OF_A_KIND:
            self.note(f"{event.link} cannot be used: {event.reason}")
            return
        if not self._counted:
            self._next_count = time.monotonic() + _COUNT_SECONDS
        self._counted[event.kind] += 1
        if time.monotonic() > self._next_count:
            self.note_counts()

    def note_counts(self) -> None:
        """Says how many notes were counted since the last time, by kind."""
        for kind, more in self._counted.items():
            self._bars.close()
            self.say(f"({more} more of this kind: {kind})")
        self._counted.clear()

    def forget_notes(self) -> None:
        """What was noted before is news again."""
        self._noted = set(self._noted_for_good)
        self._fallbacks.clear()

    def note_files(self, files: Iterable[str]) -> None:
        """Notes, once for all versions, that the files next to the weights lack a config."""
        if not {"config.json", "adapter_config.json"}.intersection(files):
            text = (
                "the stream's versions have no config.json, without which no loader knows the "
                "model (publish with files=, or copy the files of the model's checkpoint)"
            )
            self.note(text)
            self._noted_for_good.add(text)


def _printable(text: str) -> str:
    """``text`` without the control characters that a tensor's name may hold, which a terminal would
    obey."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text
    )


def facts_of(found: Any, *names: str) -> dict[str, Any]:
    """The fields ``names`` of an event or a result, its seconds to the microsecond."""
    facts = {name: getattr(found, name) for name in names}
    if "seconds" in facts:
        facts["seconds"] = round(facts["seconds"], 6)
    return facts


def print_published(done: Published, console: Console) -> None:
    names = "stream stream_id version root elements changed density dense_bytes patch_bytes "
    names += "anchor_bytes ratio reason seconds"
    facts = facts_of(done, *names.split())
    console.result(facts, f"{done}, root {done.root}")


def check_output(out: Path, mark: bytes, *, force: bool) -> None:
    """Every file that a command writes is checked by this first. It may be replaced if it has the
    ``mark`` of what the command makes: a patch, a page, or a checkpoint. Anything else needs
    ``force``. Raises InputError.
    """
    try:
        check_file(out, force=force, mark=mark)
    except (FileNotFoundError, NotADirectoryError):  # writing has an error for the second
        return
    except OSError as error:
        raise InputError(
            f"cannot write {shortened(out)}: {error.strerror}", hint="Check the path."
        ) from None


def write_output(
    out: Path, chunks: Iterable[bytes | memoryview], mark: bytes, *, force: bool
) -> None:
    """Puts a file at ``out`` whole or not at all. Raises InputError as `check_output`, StoreFull
    and StoreError."""
    check_output(out, mark, force=force)
    write_atomically(out, chunks)


def shortened(path: Path | str) -> str:
    """For a message: a path that is too long for a file is too long for a line, too."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:200]}…"
