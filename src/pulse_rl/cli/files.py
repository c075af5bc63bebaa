"""Commands on files: diff, apply, inspect, digest."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import codec as codecs
from .. import patch
from .._util.files import open_regular
from .._util.settings import counted, format_bytes
from ..errors import CorruptPatch, InputError
from ..events import progress_to
from ..follow.aux_files import files_of
from ..follow.checkpoint import FILE_NAME, current_version, load, save
from ..follow.folder import (
    CHECKPOINT_MARK,
    InUse,
    check_folder,
    replace_folder,
    write_checkpoint,
)
from ..ops.diff import build_patch
from ..patch.blocks import Block
from ..patch.header import MAGIC as PATCH_MAGIC
from ..patch.header import PRELUDE_BYTES, Base, PatchHeader, header_end, parse_header
from ..state.digest import StateDigest, state_digest
from ..state.tensors import State
from .common import (
    A_CHECKPOINT,
    COMMON,
    KEYS,
    LAYOUT,
    WRITING,
    Console,
    add_command,
    add_file_to_write,
    check_output,
    facts_of,
    write_output,
)
from .streams import version_at


def add_parsers(commands: Any) -> None:
    command = add_command(commands, "diff", diff, COMMON, WRITING, KEYS)
    command.add_argument("old", metavar="OLD", help=A_CHECKPOINT)
    command.add_argument("new", metavar="NEW", help="the checkpoint that the patch produces")
    add_file_to_write(command, "PATCH", "the patch file to write")

    command = add_command(commands, "apply", apply, COMMON, WRITING, LAYOUT, KEYS)
    command.add_argument("base", metavar="BASE", help="the checkpoint that the patch was made from")
    command.add_argument("patch", metavar="PATCH", help="a patch file")
    add_file_to_write(command, "OUT", "the result: a folder or a .safetensors file")

    command = add_command(commands, "inspect", inspect, COMMON, KEYS)
    command.add_argument("patch", metavar="PATCH", help="a patch file")
    text = "the checkpoint that the patch is for: names its tensors"
    command.add_argument("--base", metavar="CHECKPOINT", help=text)

    command = add_command(commands, "digest", digest, COMMON, KEYS)
    command.add_argument("checkpoint", metavar="CHECKPOINT", help=A_CHECKPOINT)
    text = "also print the digest of each tensor"
    command.add_argument("--tensors", action="store_true", help=text)


def diff(args: argparse.Namespace, console: Console) -> None:
    """Make a patch from two checkpoints.

    pulse diff step-100 s3://bucket/run#policy@110 -o update.patch
    """
    started = time.perf_counter()
    out = Path(args.output)
    check_output(out, PATCH_MAGIC, force=args.force)
    old, new = (_loaded(source, args, console)[0] for source in (args.old, args.new))
    digest = _digest(old, args, console)
    progress = progress_to(console, "diff", old.nbytes)
    built = build_patch(old, new, digest, threads=args.threads, progress=progress)
    write_output(out, built.chunks, PATCH_MAGIC, force=args.force)
    facts = _facts(built.header, built.nbytes, old.nbytes)
    facts["seconds"] = round(time.perf_counter() - started, 6)
    console.result(facts, *_lines(facts, args.output))


def apply(args: argparse.Namespace, console: Console) -> None:
    """Apply a patch to a checkpoint.

    pulse apply step-100 update.patch -o step-110
    """
    started = time.perf_counter()
    out = Path(args.output)
    is_file = out.suffix == ".safetensors"
    if is_file:
        check_output(out, CHECKPOINT_MARK, force=args.force)
    else:
        check_folder(out, [FILE_NAME], force=args.force)
    data = _read(args.patch)
    base, metadata, files = _loaded(args.base, args, console)
    digest = _digest(base, args, console)
    try:
        parsed = patch.parse_patch([data], digest)
    except CorruptPatch as error:
        raise CorruptPatch(f"{args.patch}: {error}", hint=error.hint) from error
    base = base.copy()
    progress = progress_to(console, "apply", base.nbytes)
    applied = patch.apply_patch(parsed, base, digest, threads=args.threads, progress=progress)
    own = {key: text for key, text in metadata.items() if not key.startswith("pulse.")}
    kept = {"format": "pt"} | own | {"pulse.root": applied.digest.root}
    if is_file:
        save(out, base, kept)
    else:

        def write(into: Path) -> None:
            write_checkpoint(into, base, applied.digest, files(), kept, sharded=args.sharded)

        with InUse(out) as use:
            use.take()
            replace_folder(out, applied.digest.root[:12], write, force=args.force)
    changed = sum(len(c) for c in applied.changes.values())
    facts = {
        "root": applied.digest.root,
        "changed": changed,
        "tensors": len(base.specs),
        "output": str(out),
        "seconds": round(time.perf_counter() - started, 6),
    }
    line = f"{out}: root {applied.digest.root} verified, {counted(changed, 'element')} changed"
    console.result(facts, line)


def inspect(args: argparse.Namespace, console: Console) -> None:
    """Show the contents of a patch.

    pulse inspect update.patch --base step-100
    """
    data = _read(args.patch)
    parsed = parse_header(data)
    if parsed.end + parsed.header.body_bytes != len(data):
        raise CorruptPatch(f"{args.patch} does not end where its header says")
    blocks: tuple[Block, ...] | None = None
    dense_bytes = None
    if args.base:
        base = _loaded(args.base, args, console)[0]
        root = _digest(base, args, console).root
        blocks = parse_header(data, Base(base.specs, root)).cuts
        dense_bytes = sum(block.nbytes for block in blocks or ())
    facts = _facts(parsed.header, len(data), dense_bytes)
    facts["history"] = parsed.header.history.windows if parsed.header.history else 0
    facts["blocks"] = []
    for k, entry in enumerate(parsed.header.blocks):
        fact: dict[str, Any] = {
            "changed": entry.changed,
            "codec": codecs.codec_name(entry.codec_id),
            "bytes": entry.length,
        }
        if blocks:
            block = blocks[k]
            fact |= {"tensors": str(block), "dtype": block.dtype.name, "elements": block.elements}
        facts["blocks"].append(fact)
    lines = _lines(facts, args.patch)
    for k, b in enumerate(facts["blocks"]):
        of = f" of {b['elements']:>12,} {b['dtype']} {b['tensors']}" if blocks else f" in block {k}"
        lines.append(f"  {b['codec']:8}{b['bytes']:>12,} B {b['changed']:>12,}{of}")
    if not args.base:
        lines.append("  A patch does not repeat its base's tensors: --base CHECKPOINT shows them.")
    console.result(facts, *lines)


def digest(args: argparse.Namespace, console: Console) -> None:
    """Print a checkpoint's root.

    pulse digest step-100
    """
    started = time.perf_counter()
    state = _loaded(args.checkpoint, args, console)[0]
    tree = _digest(state, args, console)
    facts: dict[str, Any] = {
        "root": tree.root,
        "tensors": {s.name: tree.tensor(s).hex() for s in state.specs},
        "elements": state.elements,
        "bytes": state.nbytes,
        "seconds": round(time.perf_counter() - started, 6),
    }
    lines = [f"{tree.root}  {args.checkpoint}"]
    if args.tensors:
        lines += [
            f"{facts['tensors'][s.name]}  {s.name}  {s.dtype.name} {list(s.shape)}"
            for s in state.specs
        ]
    console.result(facts, *lines)


def _loaded(
    source: str, args: argparse.Namespace, console: Console
) -> tuple[State, dict[str, str], Callable[[], dict[str, bytes]]]:
    """The state of a checkpoint or of a version of a stream (`version_at`), the text that is kept
    with it, and what reads the files beside the weights."""
    if found := version_at(source, args, console):
        return found.state, {}, found.files
    state, metadata = load(source)
    folder = current_version(Path(source))
    return state, metadata, lambda: files_of(folder) if folder.is_dir() else {}


def _digest(state: State, args: argparse.Namespace, console: Console) -> StateDigest:
    progress = progress_to(console, "digest", state.nbytes)
    return state_digest(state, threads=args.threads, progress=progress)


def _read(path: str) -> memoryview:
    """The bytes of a patch file, of which the header is well-formed. Raises InputError and
    CorruptPatch."""
    try:
        with open_regular(Path(path)) as file:
            start = file.read(PRELUDE_BYTES)
            header_end(start)  # before all of a file that may be anything is read
            data = memoryview(start + file.read())
        parse_header(data)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="Check the path.") from None
    except CorruptPatch as error:
        raise CorruptPatch(f"{path}: {error}", hint=error.hint) from error
    return data


def _facts(header: PatchHeader, nbytes: int, dense_bytes: int | None) -> dict[str, Any]:
    """What a header tells; ``dense_bytes`` are those of the tensors that the patch is for, if they
    are known."""
    return {
        **facts_of(header, "elements", "changed", "base_root", "target_root"),
        "density": header.changed / max(header.elements, 1),
        "dense_bytes": dense_bytes,
        "patch_bytes": nbytes,
        "ratio": None if dense_bytes is None else dense_bytes / nbytes,
        "bytes_per_changed": nbytes / header.changed if header.changed else None,
    }


def _lines(facts: dict[str, Any], name: str) -> list[str]:
    per_changed = facts["bytes_per_changed"]
    cost = f", {per_changed:.3f} bytes per changed element" if per_changed else ""
    size = format_bytes(facts["patch_bytes"])
    if facts["ratio"] is not None:
        size += f" for {format_bytes(facts['dense_bytes'])}, {facts['ratio']:.1f} times smaller"
    return [
        f"{name}: {size}",
        f"  {facts['changed']:,} of {counted(facts['elements'], 'element')} changed (density "
        f"{facts['density']:.4%}){cost}",
        f"  from root {facts['base_root']}",
        f"  to root   {facts['target_root']}",
    ]
