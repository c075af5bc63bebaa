"""The command ``pulse``. Each command prints readable lines, or with ``--json`` one JSON object per
result.

Exit status: 0 success; 1 refused or failed with an error of `pulse_rl.errors` (one line with a hint
on stderr), or `verify` and `store-check` have found a problem; 2 usage error; 130 interrupted. The
program starts in ``pulse_rl_command``.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from .. import __version__
from ..errors import InputError, PulseError
from . import files, following, inventory, plan, runs, streams, study
from .arguments import Shared, complete, count, options
from .output import Console, open_streams, shortened

_EXAMPLES = {
    "diff": "pulse diff step-100 s3://bucket/run#policy@110 -o update.patch",
    "apply": "pulse apply step-100 update.patch -o step-110",
    "inspect": "pulse inspect update.patch --base step-100",
    "digest": "pulse digest step-100",
    "publish": "pulse publish step-100 s3://bucket/run --stream policy --dtype BF16 --metadata "
    "step=100",
    "watch": "pulse watch broadcasts s3://bucket/run --stream policy --pattern 'step_*' --done "
    "STABLE",
    "anchor": "pulse anchor s3://bucket/run --stream policy",
    "follow": "pulse follow s3://bucket/run --stream policy --out policy",
    "checkout": "pulse checkout s3://bucket/run --stream policy --version 40 --out policy-40",
    "attest": "pulse attest s3://bucket/run --stream policy --version 40 --key trainer.key -o "
    "policy-40.sig",
    "evaluate": "pulse evaluate s3://bucket/run --stream policy --every 50 -- python evaluate.py "
    "--model {}",
    "bisect": "pulse bisect s3://bucket/run --stream policy --good 100 --bad 400 -- ./is-good.sh {}",  # noqa: E501
    "replay": "pulse replay rollouts.jsonl --store s3://bucket/run --engine http://localhost:8000",
    "list": "pulse list s3://bucket/run",
    "log": "pulse log s3://bucket/run --stream policy --last 5",
    "status": "pulse status s3://bucket/run",
    "verify": "pulse verify s3://bucket/run --stream policy",
    "fold": "pulse fold s3://bucket/run --stream policy --folds 8 64",
    "gc": "pulse gc s3://bucket/run --stream policy --keep 100 --dry-run",
    "relay": "pulse relay s3://bucket/run /near --stream policy",
    "serve": "pulse serve /near --bind 0.0.0.0",
    "keygen": "pulse keygen trainer.key",
    "store-check": "pulse store-check s3://bucket/run",
    "plan": "pulse plan --params 7B --density 0.86% --step-seconds 50s --bandwidth 0.2Gbit",
    "study": "pulse study checkpoints -o study.html",
    "report": "pulse report runs/policy -o run.html",
    "completion": 'eval "$(pulse completion bash)"',
}
_EPILOG = "examples:\n" + "\n".join(
    f"  {_EXAMPLES[name]}" for name in ("publish", "follow", "list", "gc", "plan")
)


def main(argv: Sequence[str] | None = None) -> int:
    open_streams()
    try:
        parser = make_parser()
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return 0
        console = Console(args.json)
        try:
            status: int = args.run(args, console)
        except PulseError as error:
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
    except KeyboardInterrupt:
        print("pulse: interrupted", file=sys.stderr)
        return 130
    return status


@cache
def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each command sets ``run``."""
    parser = argparse.ArgumentParser(
        prog="pulse",
        description="Lossless sparse sync of model weights.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pulse {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    shared = _shared()
    for add in _ORDER:
        add(commands, shared)
    for name, command in commands.choices.items():
        command.epilog = f"example: {_EXAMPLES[name]}"
    return parser


def _shared() -> Shared:
    common, writing, layout, named, keys, signing = (options() for _ in range(6))
    common.add_argument("--json", action="store_true", help="print JSON")
    text = "number of threads (default: one per core)"
    common.add_argument("--threads", type=count, default=None, metavar="N", help=text)
    text = "replace the output even if it is something else"
    writing.add_argument("--force", action="store_true", help=text)
    text = "write the weights in the files of the checkpoint's index, or else in files of 5 GB"
    layout.add_argument("--sharded", action="store_true", help=text)
    text = "the stream's name in the store"
    named.add_argument("--stream", required=True, metavar="S", help=text)
    stream = options(named)
    text = "a folder, or a file://, hf://, s3://, gs:// or az:// URL; http:// to read"
    stream.add_argument("store", metavar="STORE", help=text)
    text = "accept only versions signed by this public key; may be repeated"
    keys.add_argument("--trust", action="append", metavar="KEY", help=text)
    trust = options(keys)
    text = "accept only versions of the stream with this ID"
    trust.add_argument("--stream-id", metavar="ID", help=text)
    text = "sign with this private key (see keygen)"
    signing.add_argument("--sign-key", metavar="FILE", help=text)
    return Shared(common, writing, layout, named, stream, keys, trust, signing)


def _add_completion(commands: Any, _: Shared) -> None:
    command = commands.add_parser("completion", help="print a shell's completion of this command")
    command.add_argument("shell", choices=["bash", "zsh"], help="the shell")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=complete, parser=make_parser)


_ORDER = (
    files.add_parsers,
    streams.add_publish,
    following.add_watch,
    streams.add_anchor,
    following.add_follow,
    runs.add_parsers,
    streams.add_attest,
    following.add_replay,
    inventory.add_parsers,
    streams.add_upkeep,
    following.add_relay,
    streams.add_tools,
    plan.add_parser,
    study.add_parser,
    study.add_report_parser,
    _add_completion,
)
"""Help and the page of commands show them in this order."""
