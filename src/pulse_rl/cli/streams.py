"""Commands on a stream: publish, attest, keygen; and on a store: serve, store-check."""

from __future__ import annotations

import argparse
import json
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .._util.settings import counted
from ..errors import InputError, PulseError
from ..events import Listener
from ..follow.aux_files import checked_files, files_of, of_dtype
from ..follow.checkpoint import current_version, load
from ..ops.attest import BUNDLE, AttestationKey, make_statement
from ..ops.checkout import Checkout, checkout
from ..state.cast import COMPUTE_DTYPES
from ..store import Data, LocalStore, ObjectInfo, Store, open_store
from ..stream.signing import Signer
from ..sync.publisher import Publisher
from ..testing import StoreConformance
from .common import (
    A_CHECKPOINT,
    COMMON,
    LAYOUT,
    SIGNING,
    STREAM,
    TRUST,
    WRITING,
    Console,
    add_command,
    add_file_to_write,
    add_metadata,
    add_quantize,
    check_output,
    compute_dtype,
    count,
    fact,
    number,
    open_lasting,
    options,
    port,
    print_published,
    reading,
    signer_of,
    write_output,
)
from .monitor import MONITORED, Monitor
from .upkeep import folds_made

DEFAULT_PORT = 8734
# A folder's name comes on top.
_TOO_LONG_HERE = "test_the_longest_name"
_OF_CREATES = {
    "a second create is refused",
    "what was put cannot be created",
    "of racing creates one wins",
}


_ADDRESS = re.compile(r"(?P<store>.+)#(?P<stream>[^#@/]+)(?:@(?P<version>.+))?")


def version_at(source: str, args: argparse.Namespace, console: Console) -> Checkout | None:
    """The version that ``source`` names, STORE#STREAM@VERSION: its number, or KEY=VALUE of its
    metadata; without @VERSION the newest. None for any other name, and where there is such a file
    or folder. Raises InputError, and what `checkout` raises."""
    named = _ADDRESS.fullmatch(source)
    if named is None or Path(source).exists():
        return None
    which, said = named["version"], dict[str, Any]()
    if which is not None and which.isdecimal():
        said = {"version": int(which)}
    elif which is not None:
        try:
            said = {"metadata": dict([fact(which)])}
        except argparse.ArgumentTypeError:
            raise InputError(
                f"{source!r} names no version",
                hint="Name it STORE#STREAM@VERSION: the version's number, or KEY=VALUE of its "
                "metadata.",
            ) from None
    return checkout(
        open_lasting(named["store"]),
        named["stream"],
        **said,
        trusted_keys=args.trust,
        threads=args.threads,
        on_event=console,
    )


def add_parsers(commands: Any) -> None:
    checkpoint = options()  # before the store
    text = f"{A_CHECKPOINT}, with which a new stream begins"
    checkpoint.add_argument("checkpoint", metavar="CHECKPOINT", help=text)
    parents = (COMMON, checkpoint, STREAM, version_options(), SIGNING, TRUST)
    command = add_command(commands, "publish", publish, *parents)
    text = "then make folds (see fold)"
    command.add_argument("--folds", type=count, nargs="+", metavar="N", help=text)

    command = add_command(commands, "attest", attest, COMMON, STREAM, TRUST, LAYOUT, WRITING)
    text = "the version's number (default: the newest)"
    command.add_argument("--version", type=number, metavar="N", help=text)
    text = "sign with this private key of P-256, P-384 or P-521 in PEM"
    command.add_argument("--key", metavar="FILE", required=True, help=text)
    add_file_to_write(command, "FILE", "the file to write (default: print it)", required=False)

    command = add_command(commands, "serve", serve, COMMON, MONITORED, timed=True)
    text = "the store's folder, such as a relay's target"
    command.add_argument("folder", metavar="FOLDER", help=text)
    text = "this machine's address to listen at (default: 127.0.0.1)"
    command.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help=text)
    text = f"port to listen at; 0: a free one (default: {DEFAULT_PORT})"
    command.add_argument("--port", type=port, default=DEFAULT_PORT, metavar="N", help=text)

    command = add_command(commands, "keygen", keygen, COMMON)
    text = "file to write the private key to; must not exist"
    command.add_argument("file", metavar="FILE", help=text)

    command = add_command(commands, "store-check", store_check, COMMON)
    text = "a folder, or a file://, hf://, s3://, gs:// or az:// URL"
    command.add_argument("store", metavar="STORE", help=text)


def version_options() -> argparse.ArgumentParser:
    """What a command that publishes is given of a version."""
    version = options()
    text = "cast wider floating-point tensors to this compute dtype (default: as they are)"
    names = list(COMPUTE_DTYPES)
    version.add_argument("--dtype", type=compute_dtype, choices=names, help=text)
    add_quantize(
        version,
        "publish codes and scales in place of weights: {formats}, or the config.json of a "
        "quantized model, whose quantization_config says how and what is left out",
    )
    text = "store the whole state, too, for new workers to start from"
    version.add_argument("--anchor", action="store_true", help=text)
    beside = version.add_mutually_exclusive_group()
    beside.add_argument(
        "--file",
        action="append",
        metavar="FILE",
        help="a small file that goes with the weights, in place of the config, tokenizer and "
        "templates in CHECKPOINT; may be repeated",
    )
    beside.add_argument("--no-files", action="store_true", help="publish the weights alone")
    add_metadata(version, "say this of the version, such as step=40")
    text = "then keep the newest N versions (see gc)"
    version.add_argument("--keep", type=count, metavar="N", help=text)
    return version


def publish(args: argparse.Namespace, console: Console) -> None:
    """Publish a checkpoint as the next version.

    pulse publish step-100 s3://bucket/run --stream policy --dtype BF16 --metadata step=100
    """
    if found := version_at(args.checkpoint, args, console):
        if args.dtype or args.quantize or args.file or args.no_files:
            raise InputError(
                "a version begins another stream as it is",
                hint="Leave --dtype, --quantize and files out.",
            )
        with found, open_publisher(args, console) as publisher:
            print_published(
                publisher.begin_from(found, metadata=dict(args.metadata or ())), console
            )
        return
    state, _ = load(args.checkpoint)
    with open_publisher(args, console) as publisher:
        done = publisher.publish(state, **of_version(args, Path(args.checkpoint)))
    if args.folds:
        list(folds_made(args, console))
    print_published(done, console)


def open_publisher(args: argparse.Namespace, listener: Listener) -> Publisher:
    """Raises InputError for a signed stream without a key."""
    publisher = Publisher(
        open_lasting(args.store),
        stream=args.stream,
        keep=args.keep,
        signer=signer_of(args),
        trusted_keys=args.trust or (),
        threads=args.threads,
        on_event=listener,
    )
    if args.stream_id:
        publisher.stream_id = args.stream_id
    head = publisher.head()
    if head is not None and head.signature and not args.sign_key:
        raise InputError(
            f"stream {args.stream!r} is signed",
            hint="Give the key with --sign-key, or another stream.",
        )
    return publisher


def attest(args: argparse.Namespace, console: Console) -> None:
    """The signed statement about the files of a version's checkout, as model_signing verifies it.

    pulse attest s3://bucket/run --stream policy --version 40 --key trainer.key -o policy-40.sig
    """
    key = AttestationKey(args.key)
    if args.output:
        check_output(Path(args.output), BUNDLE.encode(), force=args.force)
    store = open_lasting(args.store)
    statement = make_statement(
        store, args.stream, args.version, sharded=args.sharded, **reading(args, console)
    )
    bundle = key.bundle(statement)
    if not args.output:
        console.result(bundle, json.dumps(bundle))
        return
    predicate = statement["predicate"]
    text = f"{json.dumps(bundle)}\n".encode()
    write_output(Path(args.output), [text], BUNDLE.encode(), force=args.force)
    facts = predicate["pulse"] | {"files": len(predicate["resources"]), "output": args.output}
    files = counted(facts["files"], "file")
    line = (
        f"{args.output}: version {facts['version']} of {args.stream}, {files}, root {facts['root']}"
    )
    console.result(facts, line)


def keygen(args: argparse.Namespace, console: Console) -> None:
    """Make a private key and print its public key.

    pulse keygen trainer.key
    """
    signer = Signer.generate()
    signer.save(args.file)
    console.result({"public_key": signer.public_key, "file": args.file}, signer.public_key)


def of_version(args: argparse.Namespace, checkpoint: Path, **facts: Any) -> dict[str, Any]:
    """What `Publisher.publish` is given of the version that is made of a checkpoint, by
    `version_options`, with ``facts`` among its metadata."""
    return {
        "dtype": args.dtype,
        "quantize": args.quantize,
        "anchor": args.anchor,
        "metadata": dict(args.metadata or ()) | facts,
        "files": _files_beside(args, checkpoint),
    }


def _files_beside(args: argparse.Namespace, checkpoint: Path) -> dict[str, bytes] | None:
    """What goes with the weights: those of the version before where a file of weights is published
    alone."""
    if args.no_files:
        return {}
    if args.file:
        return of_dtype(checked_files({Path(file).name: file for file in args.file}), args.dtype)
    return (
        of_dtype(files_of(current_version(checkpoint)), args.dtype) if checkpoint.is_dir() else None
    )


def serve(args: argparse.Namespace, console: Console) -> None:
    """Show a folder to readers over HTTP, for workers without credentials; take their heartbeats.

    pulse serve /near --bind 0.0.0.0
    """
    from ..stores.server import FolderServer

    with (
        Monitor(args, console, "server", "serve") as monitor,
        FolderServer(args.folder, bind=args.bind, port=args.port, on_event=monitor) as server,
    ):
        monitor.ready = True
        facts = {"url": server.url, "folder": args.folder}
        console.result(facts, f"{args.folder} is served at {server.url}")
        threading.Event().wait()


def store_check(args: argparse.Namespace, console: Console) -> int:
    """Check that a store is safe to publish to.

    pulse store-check s3://bucket/run
    """
    store = open_store(args.store)
    if isinstance(store, LocalStore) and not store.root.is_dir():
        raise InputError(
            f"there is no folder {store.root}", hint="Check the path, or create the folder first."
        )
    findings = check(store)
    safe = all(held for _, held, _ in findings)
    lines = [
        f"{'ok  ' if held else 'FAIL'} {guarantee}{f': {seen}' * bool(seen)}"
        for guarantee, held, seen in findings
    ]
    lines.append(f"{args.store} is {'safe' if safe else 'NOT safe'} to publish to")
    if not safe and all(held or guarantee in _OF_CREATES for guarantee, held, _ in findings):
        lines.insert(
            -1, "one publisher alone may use it, by convention: it would not notice a second one"
        )
    names = ("guarantee", "held", "seen")
    facts = {"safe": safe, "findings": [dict(zip(names, each, strict=True)) for each in findings]}
    console.result(facts, *lines)
    return 0 if safe else 1


def check(store: Store) -> list[tuple[str, bool, str]]:
    """(guarantee, whether it held, what was seen) of each test of the suite. Some S3-compatible
    servers ignore If-None-Match and let both of two creates succeed: there a second publisher could
    overwrite a version unseen.

    Its objects are removed by their names: lists may be what does not work. Raises StoreError if
    the store cannot be used at all.
    """
    suite = _Suite(store)
    names = [name for name in vars(StoreConformance) if name.startswith("test_")]
    names.remove(_TOO_LONG_HERE)
    findings = []
    try:
        suite.new_store().put("reachable", b"")
        for name in names:
            try:
                getattr(suite, name)()
                seen = ""
            except (AssertionError, PulseError) as error:
                seen = " ".join(str(error).split()) or type(error).__name__
            findings.append((name.removeprefix("test_").replace("_", " "), not seen, seen))
    finally:
        for written in sorted(suite.written):
            with suppress(InputError):  # a test tries such names, too
                store.delete(written)
    return findings


class _Suite(StoreConformance):
    many_objects = 103

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = f"pulse-store-check/{secrets.token_hex(8)}"
        self._folders = 0
        self.written = set[str]()

    def new_store(self) -> Store:
        self._folders += 1
        return _Folder(self._store, f"{self._root}/{self._folders}", self.written)


class _Folder:
    """A folder of a store as a store of its own, which notes what it has written."""

    def __init__(self, store: Store, folder: str, written: set[str]) -> None:
        self._store = store
        self._folder = folder
        self._written = written

    def _inside(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _writing(self, name: str) -> str:
        self._written.add(self._inside(name))
        return self._inside(name)

    def put(self, name: str, data: Data) -> None:
        self._store.put(self._writing(name), data)

    def put_new(self, name: str, data: bytes) -> None:
        self._store.put_new(self._writing(name), data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._store.get(self._inside(name), start, stop)

    def head(self, name: str) -> ObjectInfo:
        return self._own(self._store.head(self._inside(name)))

    def list(self, folder: str, start_after: str | None = None) -> Iterator[ObjectInfo]:
        after = None if start_after is None else self._inside(start_after)
        return map(
            self._own, self._store.list(self._inside(folder) if folder else self._folder, after)
        )

    def delete(self, name: str) -> None:
        self._store.delete(self._inside(name))

    def _own(self, info: ObjectInfo) -> ObjectInfo:
        return info._replace(name=info.name.removeprefix(f"{self._folder}/"))
