"""The command ``pulse``. Each command prints readable lines, or one JSON object a result with ``--json``.

Exit status: 0 done, 1 refused or failed with an error of `pulse_rl.errors` (one line with a hint on stderr), 2 wrong
usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence

from .. import __version__
from .. import codec as codecs
from ..errors import PulseError
from ..maintenance.gc import DEFAULT_GRACE_SECONDS
from ..sync.folds import DEFAULT_FOLDS
from . import files, plan, report, streams, study
from .output import Console

_MOST_SECONDS = 1e9


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    console = Console(args.json)
    try:
        status: int = args.run(args, console)
    except PulseError as error:
        console.error(error)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has seen enough; what is left to flush must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("pulse: interrupted", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pulse", description="Lossless sparse sync of model weights.")
    parser.add_argument("--version", action="version", version=f"pulse {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    common.add_argument("--threads", type=_count, default=None, metavar="N", help="threads (default: all cores)")
    coding = argparse.ArgumentParser(add_help=False)
    coding.add_argument("--codec", choices=codecs.names(), default=codecs.DEFAULT)
    stream = argparse.ArgumentParser(add_help=False)
    stream.add_argument("store", metavar="STORE", help="a folder, file://, s3://, gs:// or az://")
    stream.add_argument("--stream", required=True, metavar="S", help="the stream's name in the store")
    trust = argparse.ArgumentParser(add_help=False)
    trust.add_argument("--trust", action="append", metavar="KEY", help="accept only what this public key has signed")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("diff", parents=[common, coding], help="make a patch from two checkpoints")
    command.add_argument("old", metavar="OLD", help="a checkpoint: a .safetensors file or a folder")
    command.add_argument("new", metavar="NEW")
    command.add_argument("-o", "--output", required=True, metavar="PATCH")
    command.set_defaults(run=files.diff)

    command = commands.add_parser("apply", parents=[common], help="apply a patch to a checkpoint")
    command.add_argument("base", metavar="BASE")
    command.add_argument("patch", metavar="PATCH")
    command.add_argument("-o", "--output", required=True, metavar="OUT", help="a folder or a .safetensors file")
    command.set_defaults(run=files.apply)

    command = commands.add_parser("inspect", parents=[common], help="show what a patch holds")
    command.add_argument("patch", metavar="PATCH")
    command.set_defaults(run=files.inspect)

    command = commands.add_parser("digest", parents=[common], help="print a checkpoint's root")
    command.add_argument("checkpoint", metavar="CHECKPOINT")
    command.add_argument("--tensors", action="store_true", help="also the digest of each tensor")
    command.set_defaults(run=files.digest)

    command = commands.add_parser("publish", parents=[common, coding], help="publish a checkpoint as the next version")
    command.add_argument("checkpoint", metavar="CHECKPOINT")
    command.add_argument("store", metavar="STORE", help="a folder, file://, s3://, gs:// or az://")
    command.add_argument("--stream", required=True, metavar="S", help="the stream's name in the store")
    command.add_argument("--sign-key", metavar="FILE", help="sign the version (see keygen)")
    command.set_defaults(run=streams.publish)

    command = commands.add_parser(
        "follow", parents=[common, stream, trust], help="keep a checkpoint at the newest version"
    )
    command.add_argument("--out", required=True, metavar="DIR", help="DIR/model.safetensors is replaced atomically")
    command.add_argument("--once", action="store_true", help="sync once and end")
    command.add_argument("--poll", type=_seconds, default=1.0, metavar="SECONDS", help="between two looks (default 1)")
    command.add_argument("--cache", metavar="DIR", help="keep payloads there, to be downloaded once")
    command.set_defaults(run=streams.follow)

    command = commands.add_parser("verify", parents=[common, stream, trust], help="replay and check a whole stream")
    command.set_defaults(run=streams.verify)

    command = commands.add_parser("fold", parents=[common, stream], help="make patches over many versions")
    command.add_argument(
        "--folds", type=_count, nargs="+", default=list(DEFAULT_FOLDS), metavar="N", help="default: 8 64"
    )
    command.set_defaults(run=streams.fold)

    command = commands.add_parser("gc", parents=[common, stream], help="delete what kept versions do not need")
    command.add_argument("--keep", type=_count, required=True, metavar="N", help="versions to keep, from the newest")
    command.add_argument(
        "--grace",
        type=_seconds,
        default=DEFAULT_GRACE_SECONDS,
        metavar="SECONDS",
        help="payloads written since stay, named or not (default 3600)",
    )
    command.add_argument("--dry-run", action="store_true", help="only say what would go")
    command.set_defaults(run=streams.gc)

    command = commands.add_parser("keygen", parents=[common], help="make a key to sign with, print its public key")
    command.add_argument("file", metavar="FILE", help="the private key; must not exist")
    command.set_defaults(run=streams.keygen)

    command = commands.add_parser("store-check", parents=[common], help="is a store safe to publish to?")
    command.add_argument("store", metavar="STORE")
    command.set_defaults(run=streams.store_check)

    plan.add_parser(commands)
    study.add_parser(commands)
    report.add_parser(commands)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value
