"""What commands share: parent parsers, repeated options, what arguments are read as, and the
completion of a shell from the parsers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from .._util.settings import parse_seconds
from ..errors import InputError
from ..quantize.formats import FORMATS
from ..state.cast import compute_dtype_named
from .output import Console

_MAX_SECONDS = 1e9
A_CHECKPOINT = "a .safetensors file, a folder, or a version of a stream, STORE#STREAM@VERSION"
READABLE = "a folder, or a file://, hf://, http://, s3://, gs:// or az:// URL"


class Shared(NamedTuple):
    """The parsers of options that several commands take, as parents of theirs."""

    common: argparse.ArgumentParser
    writing: argparse.ArgumentParser
    layout: argparse.ArgumentParser
    named: argparse.ArgumentParser
    stream: argparse.ArgumentParser
    keys: argparse.ArgumentParser
    trust: argparse.ArgumentParser
    signing: argparse.ArgumentParser


def options(*parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A parser that serves as a parent of others."""
    return argparse.ArgumentParser(add_help=False, parents=parents)


def add_poll(command: argparse.ArgumentParser, what: str) -> None:
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


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


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
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(FORMATS)}, and no config.json of a quantized model "
            f"({error})"
        ) from None
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f"the quantization_config of {text!r} is no object")
    return config


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


def complete(args: argparse.Namespace, console: Console) -> int:
    """Prints what a shell is to run: commands, their options, and files elsewhere."""
    commands = commands_of(args.parser())
    cases = [
        f'    {name}) [ "$COMP_CWORD" -eq 1 ] || '
        f'words="{" ".join(sorted(parser._option_string_actions))}";;'
        for name, parser in commands.choices.items()
    ]
    script = _BASH.format(commands=" ".join(commands.choices), cases="\n".join(cases))
    lines = [*([_ZSH] if args.shell == "zsh" else []), *script.split("\n")]
    console.result({"shell": args.shell, "script": "\n".join(lines)}, lines)
    return 0


def commands_of(parser: argparse.ArgumentParser) -> Any:
    """The action of a parser that holds its commands."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return commands
