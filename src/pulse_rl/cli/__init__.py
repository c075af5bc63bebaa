"""The command ``pulse``. Each command prints readable lines, or with ``--json`` one JSON object per result.

Exit status: 0 success; 1 refused or failed with an error of `pulse_rl.errors` (one line with a hint on stderr), or
`verify` and `store-check` have found a problem; 2 usage error; 130 interrupted. The program starts in
``pulse_rl_command``.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from .. import __version__
from .. import codec as codecs
from .._util.settings import parse_seconds
from ..errors import InputError, PulseError
from ..maintenance.gc import DEFAULT_GRACE_SECONDS
from ..state.cast import COMPUTE_DTYPES
from ..sync.folds import DEFAULT_FOLDS
from . import files, following, plan, streams, study
from .output import Console, open_streams, shortened

_MOST_SECONDS = 1e9


def main(argv: Sequence[str] | None = None) -> int:
    open_streams()
    try:
        args = make_parser().parse_args(argv)
        console = Console(args.json)
        try:
            status: int = args.run(args, console)
        except PulseError as error:
            console.error(error)
            return 1
        except OSError as error:
            if error.filename is None:  # not of a path, but of the output
                raise
            path = shortened(str(error.filename))
            console.error(InputError(f"cannot use {path}: {error.strerror}", hint="Check the path."))
            return 1
    except OSError as error:
        # The output cannot take what was printed. What is left to flush must not fail again at exit.
        with suppress(io.UnsupportedOperation):  # somebody's own stream, without a descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader (head, less) has seen enough
            print(f"pulse: {error.strerror or error} (Check the output.)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pulse: interrupted", file=sys.stderr)
        return 130
    return status


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each command sets ``run``."""
    parser = argparse.ArgumentParser(prog="pulse", description="Lossless sparse sync of model weights.")
    parser.add_argument("--version", action="version", version=f"pulse {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    common.add_argument(
        "--threads", type=_count, default=None, metavar="N", help="number of threads (default: one per core)"
    )
    writing = argparse.ArgumentParser(add_help=False)
    writing.add_argument("--force", action="store_true", help="replace the output even if it is something else")
    layout = argparse.ArgumentParser(add_help=False)
    layout.add_argument(
        "--sharded",
        action="store_true",
        help="write the weights in the files of the checkpoint's index, or else in files of 5 GB",
    )
    coding = argparse.ArgumentParser(add_help=False)
    coding.add_argument(
        "--codec",
        choices=codecs.CODECS,
        default=codecs.AUTO,
        help=f"codec for the changes (default: {codecs.AUTO})",
    )
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--stream", required=True, metavar="S", help="the stream's name in the store")
    stream = argparse.ArgumentParser(add_help=False, parents=[named])
    stream.add_argument("store", metavar="STORE", help="a folder, or a file://, s3://, gs:// or az:// URL")
    trust = argparse.ArgumentParser(add_help=False)
    trust.add_argument(
        "--trust",
        action="append",
        metavar="KEY",
        help="accept only versions signed by this public key; may be repeated",
    )
    trust.add_argument("--stream-id", metavar="ID", help="accept only versions of the stream with this ID")
    signing = argparse.ArgumentParser(add_help=False)
    signing.add_argument("--sign-key", metavar="FILE", help="sign with this private key (see keygen)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("diff", parents=[common, coding, writing], help="make a patch from two checkpoints")
    command.add_argument("old", metavar="OLD", help="a checkpoint: a .safetensors file or a folder")
    command.add_argument("new", metavar="NEW", help="the checkpoint that the patch produces")
    command.add_argument("-o", "--output", required=True, metavar="PATCH", help="the patch file to write")
    command.set_defaults(run=files.diff)

    command = commands.add_parser("apply", parents=[common, writing, layout], help="apply a patch to a checkpoint")
    command.add_argument("base", metavar="BASE", help="the checkpoint that the patch was made from")
    command.add_argument("patch", metavar="PATCH", help="a patch file")
    command.add_argument(
        "-o", "--output", type=_path, required=True, metavar="OUT", help="the result: a folder or a .safetensors file"
    )
    command.set_defaults(run=files.apply)

    command = commands.add_parser("inspect", parents=[common], help="show the contents of a patch")
    command.add_argument("patch", metavar="PATCH", help="a patch file")
    command.add_argument("--base", metavar="CHECKPOINT", help="the checkpoint that the patch is for: names its tensors")
    command.set_defaults(run=files.inspect)

    command = commands.add_parser("digest", parents=[common], help="print a checkpoint's root")
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="a .safetensors file or a folder")
    command.add_argument("--tensors", action="store_true", help="also print the digest of each tensor")
    command.set_defaults(run=files.digest)

    checkpoint = argparse.ArgumentParser(add_help=False)
    checkpoint.add_argument("checkpoint", metavar="CHECKPOINT", help="a .safetensors file or a folder")
    command = commands.add_parser(
        "publish",
        parents=[common, coding, checkpoint, stream, signing, trust],
        help="publish a checkpoint as the next version",
    )
    command.add_argument(
        "--dtype",
        type=str.upper,
        choices=list(COMPUTE_DTYPES),
        help="cast wider floating-point tensors to this compute dtype (default: as they are)",
    )
    command.add_argument(
        "--anchor", action="store_true", help="store the whole state, too, for newcomers to start from"
    )
    beside = command.add_mutually_exclusive_group()
    beside.add_argument(
        "--file",
        action="append",
        metavar="FILE",
        help="a small file that goes with the weights, in place of the config, tokenizer and templates in CHECKPOINT; "
        "may be repeated",
    )
    beside.add_argument("--no-files", action="store_true", help="publish the weights alone")
    command.set_defaults(run=streams.publish)

    command = commands.add_parser(
        "anchor",
        parents=[common, stream, signing, trust],
        help="publish the newest version once more, whole, for newcomers to start from",
    )
    command.set_defaults(run=streams.anchor)

    command = commands.add_parser(
        "follow",
        parents=[common, named, trust, writing, layout],
        help="keep a checkpoint or a live engine up to date with a stream",
    )
    command.add_argument(
        "store",
        metavar="STORE",
        nargs="+",
        help="a folder, or a file://, http://, s3://, gs:// or az:// URL; several in order of preference, the stream's "
        "own last",
    )
    kept = command.add_mutually_exclusive_group(required=True)
    kept.add_argument("--out", type=_path, metavar="DIR", help="a folder that engines load, replaced atomically")
    kept.add_argument("--engine", metavar="URL", help="a vLLM or SGLang server, started for pulse")
    command.add_argument(
        "--in-flight",
        choices=["keep", "abort", "wait"],
        default="keep",
        help="what becomes of an engine's requests at an update (default: keep)",
    )
    command.add_argument(
        "--select",
        action="append",
        metavar="PATTERN",
        help="only the tensors with this name, or one like 'layers.0.*'; may be repeated",
    )
    command.add_argument("--once", action="store_true", help="sync once, then exit")
    command.add_argument(
        "--allow-recreated", action="store_true", help="if the stream is deleted and recreated, follow the new one"
    )
    command.add_argument(
        "--poll",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="seconds between polls of the store; an http:// one is waited for instead (default: 1)",
    )
    command.add_argument("--cache", type=_path, metavar="DIR", help="keep downloaded payloads in this folder")
    command.set_defaults(run=following.follow)

    command = commands.add_parser("verify", parents=[common, stream, trust], help="replay and check a whole stream")
    command.set_defaults(run=streams.verify)

    command = commands.add_parser(
        "fold",
        parents=[common, stream, signing, trust],
        help="make patches that span many versions, for workers that are far behind",
    )
    command.add_argument(
        "--folds",
        type=_count,
        nargs="+",
        default=list(DEFAULT_FOLDS),
        metavar="N",
        help="how many versions each fold spans (default: 8 64)",
    )
    command.set_defaults(run=streams.fold)

    command = commands.add_parser(
        "gc", parents=[common, stream, trust], help="delete what the kept versions do not need"
    )
    command.add_argument("--keep", type=_count, required=True, metavar="N", help="number of newest versions to keep")
    command.add_argument(
        "--grace",
        type=_seconds,
        default=DEFAULT_GRACE_SECONDS,
        metavar="SECONDS",
        help="keep payloads written in the last SECONDS (default: 3600)",
    )
    command.add_argument("--dry-run", action="store_true", help="only show what would be deleted")
    command.set_defaults(run=streams.gc)

    command = commands.add_parser(
        "relay", parents=[common, trust], help="mirror streams into another store, for the workers near that one"
    )
    command.add_argument("source", metavar="SOURCE", help="the store to copy from: a folder, or a URL as for STORE")
    command.add_argument("target", metavar="TARGET", help="the store to copy to, to which nobody else publishes")
    command.add_argument(
        "--stream", required=True, action="append", metavar="S", help="a stream's name; may be repeated"
    )
    command.add_argument(
        "--keep", type=_count, metavar="N", help="keep the newest N versions of the target restorable (default: all)"
    )
    command.add_argument("--once", action="store_true", help="copy what is there, then exit")
    command.add_argument(
        "--allow-recreated", action="store_true", help="if a stream is deleted and recreated, copy the new one instead"
    )
    command.add_argument(
        "--poll",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="seconds between polls of the source; an http:// one is waited for instead (default: 1)",
    )
    command.set_defaults(run=following.relay)

    command = commands.add_parser(
        "serve", parents=[common], help="show a folder to readers over HTTP, for workers without credentials"
    )
    command.add_argument("folder", metavar="FOLDER", help="the store's folder, such as a relay's target")
    command.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="this machine's address to listen at (default: 127.0.0.1)",
    )
    command.add_argument(
        "--port",
        type=_port,
        default=streams.DEFAULT_PORT,
        metavar="N",
        help=f"port to listen at; 0: a free one (default: {streams.DEFAULT_PORT})",
    )
    command.set_defaults(run=streams.serve)

    command = commands.add_parser("keygen", parents=[common], help="make a private key and print its public key")
    command.add_argument("file", metavar="FILE", help="file to write the private key to; must not exist")
    command.set_defaults(run=streams.keygen)

    command = commands.add_parser("store-check", parents=[common], help="check that a store is safe to publish to")
    command.add_argument("store", metavar="STORE", help="a folder, or a file://, s3://, gs:// or az:// URL")
    command.set_defaults(run=streams.store_check)

    plan.add_parser(commands)
    study.add_parser(commands)
    study.add_report_parser(commands)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _path(text: str) -> str:
    if not text:  # of a shell variable that is not set; it would be the current folder
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def _seconds(text: str) -> float:
    try:
        value = parse_seconds(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value > _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than a run")
    return value
