"""The command ``pulse``. Each command prints readable lines, or with ``--json`` one JSON object per
result.

Exit status: 0 success; 1 refused or failed with an error of `pulse_rl.errors` (one line with a hint
on stderr), or `verify`, `store-check` or `status --stale` has found a problem; 2 usage error; 130
interrupted; 143 ended by SIGTERM. The program starts in ``pulse_rl_command``.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

from .. import __version__
from ..errors import InputError, PulseError
from . import files, following, inventory, runs, streams, study, upkeep
from .common import AS_JSON, Console, add_command, open_streams, shortened

# The commands whose examples stand below the help.
_SHOWN = ("publish", "follow", "list", "gc", "plan")


def main(argv: Sequence[str] | None = None) -> int:
    open_streams()
    console = Console(as_json=False)
    try:
        parser = make_parser()
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return 0
        console = Console(args.json, timed=args.timed)
        try:
            with _ended_by_sigterm():
                status: int = args.run(args, console) or 0
            console.note_counts()
        except PulseError as error:
            console.note_counts()
            console.error(error)
            return 1
        except OSError as error:
            if error.filename is None:  # not of a path, but of the output
                raise
            shown = shortened(str(error.filename))
            console.error(
                InputError(f"cannot use {shown}: {error.strerror}", hint="Check the path.")
            )
            return 1
    except OSError as error:
        # The output cannot take what was printed. What is left to flush must not fail again at
        # exit.
        with suppress(io.UnsupportedOperation):  # somebody's own stream, without a descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader (head, less) has seen enough
            print(f"pulse: {error.strerror or error} (Check the output.)", file=sys.stderr)
        return 1
    except _Terminated:
        console.say("terminated")
        return 143
    except KeyboardInterrupt:
        console.say("interrupted")
        return 130
    return status


class _Terminated(KeyboardInterrupt):
    pass


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does. The first process of a container would ignore it."""

    def terminate(*_: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@cache
def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each command sets ``run``."""
    parser = argparse.ArgumentParser(
        prog="pulse",
        description="Lossless sparse sync of model weights.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pulse {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for module in (files, streams, upkeep, following, runs, inventory, study):
        module.add_parsers(commands)
    completion = add_command(commands, "completion", complete, AS_JSON)
    completion.add_argument("shell", choices=["bash", "zsh"], help="the shell")
    examples = (str(commands.choices[name].epilog).partition(": ")[2] for name in _SHOWN)
    parser.epilog = "\n  ".join(["examples:", *examples])
    return parser


_BASH = """_pulse() {{
  local words="{commands}"
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  [ "$COMP_CWORD" -eq 1 ] || [[ "$2" == -* ]] || words=""
  COMPREPLY=($(compgen -W "$words" -- "$2"))
}}
complete -o default -F _pulse pulse"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit"


def complete(args: argparse.Namespace, console: Console) -> None:
    """Print a shell's completion of this command.

    eval "$(pulse completion bash)"
    """
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    cases = [
        f'    {name}) [ "$COMP_CWORD" -eq 1 ] || '
        f'words="{" ".join(sorted(parser._option_string_actions))}";;'
        for name, parser in commands.choices.items()
    ]
    script = _BASH.format(commands=" ".join(commands.choices), cases="\n".join(cases))
    lines = [*([_ZSH] if args.shell == "zsh" else []), *script.split("\n")]
    console.result({"shell": args.shell, "script": "\n".join(lines)}, *lines)
