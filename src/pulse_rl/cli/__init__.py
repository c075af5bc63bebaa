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

from .. import __version__
from ..errors import InputError, PulseError
from ..maintenance.compaction import DEFAULT_FOLDS
from ..state.cast import COMPUTE_DTYPES
from ..state.quantise_formats import FORMATS
from ..sync.gc import DEFAULT_GRACE_SECONDS
from . import files, following, inventory, plan, runs, streams, study
from .arguments import (
    complete,
    compute_dtype,
    count,
    fact,
    number,
    path,
    port,
    quantisation,
    seconds,
)
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
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    common.add_argument(
        "--threads",
        type=count,
        default=None,
        metavar="N",
        help="number of threads (default: one per core)",
    )
    writing = argparse.ArgumentParser(add_help=False)
    writing.add_argument(
        "--force", action="store_true", help="replace the output even if it is something else"
    )
    layout = argparse.ArgumentParser(add_help=False)
    layout.add_argument(
        "--sharded",
        action="store_true",
        help="write the weights in the files of the checkpoint's index, or else in files of 5 GB",
    )
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument(
        "--stream", required=True, metavar="S", help="the stream's name in the store"
    )
    stream = argparse.ArgumentParser(add_help=False, parents=[named])
    addresses = "a folder, or a file://, hf://, s3://, gs:// or az:// URL; http:// to read"
    stream.add_argument("store", metavar="STORE", help=addresses)
    keys = argparse.ArgumentParser(add_help=False)
    keys.add_argument(
        "--trust",
        action="append",
        metavar="KEY",
        help="accept only versions signed by this public key; may be repeated",
    )
    trust = argparse.ArgumentParser(add_help=False, parents=[keys])
    trust.add_argument(
        "--stream-id", metavar="ID", help="accept only versions of the stream with this ID"
    )
    signing = argparse.ArgumentParser(add_help=False)
    signing.add_argument(
        "--sign-key", metavar="FILE", help="sign with this private key (see keygen)"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    a_checkpoint = "a .safetensors file, a folder, or a version of a stream, STORE#STREAM@VERSION"

    command = commands.add_parser(
        "diff", parents=[common, writing, keys], help="make a patch from two checkpoints"
    )
    command.add_argument("old", metavar="OLD", help=a_checkpoint)
    command.add_argument("new", metavar="NEW", help="the checkpoint that the patch produces")
    command.add_argument(
        "-o", "--output", required=True, metavar="PATCH", help="the patch file to write"
    )
    command.set_defaults(run=files.diff)

    command = commands.add_parser(
        "apply", parents=[common, writing, layout, keys], help="apply a patch to a checkpoint"
    )
    command.add_argument("base", metavar="BASE", help="the checkpoint that the patch was made from")
    command.add_argument("patch", metavar="PATCH", help="a patch file")
    command.add_argument(
        "-o",
        "--output",
        type=path,
        required=True,
        metavar="OUT",
        help="the result: a folder or a .safetensors file",
    )
    command.set_defaults(run=files.apply)

    command = commands.add_parser(
        "inspect", parents=[common, keys], help="show the contents of a patch"
    )
    command.add_argument("patch", metavar="PATCH", help="a patch file")
    command.add_argument(
        "--base",
        metavar="CHECKPOINT",
        help="the checkpoint that the patch is for: names its tensors",
    )
    command.set_defaults(run=files.inspect)

    command = commands.add_parser(
        "digest", parents=[common, keys], help="print a checkpoint's root"
    )
    command.add_argument("checkpoint", metavar="CHECKPOINT", help=a_checkpoint)
    command.add_argument(
        "--tensors", action="store_true", help="also print the digest of each tensor"
    )
    command.set_defaults(run=files.digest)

    checkpoint = argparse.ArgumentParser(add_help=False)
    checkpoint.add_argument(
        "checkpoint", metavar="CHECKPOINT", help=f"{a_checkpoint}, with which a new stream begins"
    )
    version = argparse.ArgumentParser(add_help=False)
    version.add_argument(
        "--dtype",
        type=compute_dtype,
        choices=list(COMPUTE_DTYPES),
        help="cast wider floating-point tensors to this compute dtype (default: as they are)",
    )
    version.add_argument(
        "--quantise",
        type=quantisation,
        metavar="FORMAT",
        help=f"publish codes and scales in place of weights: {', '.join(FORMATS)}, or the "
        "config.json of a quantised "
        "model, whose quantization_config says how and what is left out",
    )
    version.add_argument(
        "--anchor",
        action="store_true",
        help="store the whole state, too, for newcomers to start from",
    )
    beside = version.add_mutually_exclusive_group()
    beside.add_argument(
        "--file",
        action="append",
        metavar="FILE",
        help="a small file that goes with the weights, in place of the config, tokenizer and "
        "templates in CHECKPOINT; "
        "may be repeated",
    )
    beside.add_argument("--no-files", action="store_true", help="publish the weights alone")
    version.add_argument(
        "--metadata",
        type=fact,
        action="append",
        metavar="KEY=VALUE",
        help="say this of the version, such as step=40; may be repeated",
    )
    version.add_argument(
        "--keep", type=count, metavar="N", help="then keep the newest N versions (see gc)"
    )
    command = commands.add_parser(
        "publish",
        parents=[common, checkpoint, stream, version, signing, trust],
        help="publish a checkpoint as the next version",
    )
    command.add_argument(
        "--folds", type=count, nargs="+", metavar="N", help="then make folds (see fold)"
    )
    command.set_defaults(run=streams.publish)

    watched = argparse.ArgumentParser(add_help=False)
    watched.add_argument(
        "folder", metavar="FOLDER", help="where the trainer writes a folder for each step"
    )
    command = commands.add_parser(
        "watch",
        parents=[common, watched, stream, version, signing, trust],
        help="publish the checkpoints that a trainer writes into a folder, each once, in the "
        "order of their steps",
    )
    command.add_argument(
        "--pattern",
        default="*",
        metavar="GLOB",
        help="the names of those folders, such as step_* (default: *)",
    )
    command.add_argument(
        "--done",
        required=True,
        metavar="FILE",
        help="the file that the trainer writes last, such as STABLE",
    )
    command.add_argument("--once", action="store_true", help="publish what is there, then exit")
    command.add_argument(
        "--poll",
        type=seconds,
        default=1.0,
        metavar="SECONDS",
        help="seconds between looks (default: 1)",
    )
    command.set_defaults(run=following.watch)

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
        help="a folder, or a file://, hf://, http://, s3://, gs:// or az:// URL; several in "
        "order of preference, the "
        "stream's own last",
    )
    kept = command.add_mutually_exclusive_group(required=True)
    kept.add_argument(
        "--out", type=path, metavar="DIR", help="a folder that engines load, replaced atomically"
    )
    kept.add_argument("--engine", metavar="URL", help="a vLLM or SGLang server, started for pulse")
    command.add_argument(
        "--layout",
        metavar="NAME",
        help="a folder in DIR for each version, as trainers write them: prime-rl, slime, areal, "
        "hf, or a pattern such "
        "as step_{}/STABLE, the folder and the file that is written last",
    )
    command.add_argument(
        "--keep",
        type=count,
        metavar="N",
        help="keep the newest N folders of the layout (default: all)",
    )
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
        "--allow-recreated",
        action="store_true",
        help="if the stream is deleted and recreated, follow the new one",
    )
    command.add_argument(
        "--poll",
        type=seconds,
        default=1.0,
        metavar="SECONDS",
        help="seconds between polls of the store (default: 1)",
    )
    command.add_argument(
        "--cache", type=path, metavar="DIR", help="keep downloaded payloads in this folder"
    )
    command.add_argument(
        "--name", metavar="W", help="tell in the store which version this worker holds (see status)"
    )
    command.set_defaults(run=following.follow)

    runs.add_parsers(commands, [common, stream, trust], [layout, writing])

    command = commands.add_parser(
        "attest",
        parents=[common, stream, trust, layout, writing],
        help="the signed statement about the files of a version's checkout, as model_signing "
        "verifies it",
    )
    command.add_argument(
        "--version", type=number, metavar="N", help="the version's number (default: the newest)"
    )
    command.add_argument(
        "--key",
        metavar="FILE",
        required=True,
        help="sign with this private key of P-256, P-384 or P-521 in PEM",
    )
    command.add_argument(
        "-o", "--output", type=path, metavar="FILE", help="the file to write (default: print it)"
    )
    command.set_defaults(run=streams.attest)

    command = commands.add_parser(
        "replay",
        parents=[common, trust],
        help="generate rollouts again, with the exact weights that they came from",
    )
    command.add_argument(
        "records", metavar="RECORDS", help="a file of rollout records (docs/replay.md)"
    )
    command.add_argument(
        "--store", required=True, metavar="STORE", help="the store that has their streams"
    )
    command.add_argument(
        "--engine",
        metavar="URL",
        help="a vLLM or SGLang server, started for pulse (default: a vLLM of its own)",
    )
    command.set_defaults(run=following.replay)

    inventory.add_parsers(commands, [common], trust)

    command = commands.add_parser(
        "verify", parents=[common, stream, trust], help="replay and check a whole stream"
    )
    command.set_defaults(run=streams.verify)

    command = commands.add_parser(
        "fold",
        parents=[common, stream, signing, trust],
        help="make patches that span many versions, for workers that are far behind",
    )
    command.add_argument(
        "--folds",
        type=count,
        nargs="+",
        default=list(DEFAULT_FOLDS),
        metavar="N",
        help="how many versions each fold spans (default: 8 64)",
    )
    command.set_defaults(run=streams.fold)

    command = commands.add_parser(
        "gc", parents=[common, stream, trust], help="delete what the kept versions do not need"
    )
    command.add_argument(
        "--keep", type=count, required=True, metavar="N", help="number of newest versions to keep"
    )
    command.add_argument(
        "--grace",
        type=seconds,
        default=DEFAULT_GRACE_SECONDS,
        metavar="SECONDS",
        help="keep payloads written in the last SECONDS (default: 3600)",
    )
    command.add_argument("--dry-run", action="store_true", help="only show what would be deleted")
    command.set_defaults(run=streams.gc)

    command = commands.add_parser(
        "relay",
        parents=[common, trust],
        help="mirror streams into another store, for the workers near that one",
    )
    command.add_argument(
        "source", metavar="SOURCE", help="the store to copy from: a folder, or a URL as for STORE"
    )
    command.add_argument(
        "target", metavar="TARGET", help="the store to copy to, to which nobody else publishes"
    )
    command.add_argument(
        "--stream",
        required=True,
        action="append",
        metavar="S",
        help="a stream's name; may be repeated",
    )
    command.add_argument(
        "--keep",
        type=count,
        metavar="N",
        help="keep the newest N versions of the target restorable (default: all)",
    )
    command.add_argument("--once", action="store_true", help="copy what is there, then exit")
    command.add_argument(
        "--allow-recreated",
        action="store_true",
        help="if a stream is deleted and recreated, copy the new one instead",
    )
    command.add_argument(
        "--poll",
        type=seconds,
        default=1.0,
        metavar="SECONDS",
        help="seconds between polls of the source (default: 1)",
    )
    command.set_defaults(run=following.relay)

    command = commands.add_parser(
        "serve",
        parents=[common],
        help="show a folder to readers over HTTP, for workers without credentials",
    )
    command.add_argument(
        "folder", metavar="FOLDER", help="the store's folder, such as a relay's target"
    )
    command.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="this machine's address to listen at (default: 127.0.0.1)",
    )
    command.add_argument(
        "--port",
        type=port,
        default=streams.DEFAULT_PORT,
        metavar="N",
        help=f"port to listen at; 0: a free one (default: {streams.DEFAULT_PORT})",
    )
    command.set_defaults(run=streams.serve)

    command = commands.add_parser(
        "keygen", parents=[common], help="make a private key and print its public key"
    )
    command.add_argument(
        "file", metavar="FILE", help="file to write the private key to; must not exist"
    )
    command.set_defaults(run=streams.keygen)

    command = commands.add_parser(
        "store-check", parents=[common], help="check that a store is safe to publish to"
    )
    command.add_argument(
        "store", metavar="STORE", help="a folder, or a file://, hf://, s3://, gs:// or az:// URL"
    )
    command.set_defaults(run=streams.store_check)

    plan.add_parser(commands)
    study.add_parser(commands)
    study.add_report_parser(commands)

    command = commands.add_parser("completion", help="print a shell's completion of this command")
    command.add_argument("shell", choices=["bash", "zsh"], help="the shell")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=complete, parser=make_parser)
    for name, command in commands.choices.items():
        command.epilog = f"example: {_EXAMPLES[name]}"
    return parser
