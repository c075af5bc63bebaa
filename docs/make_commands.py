"""Writes docs/commands.md from the parsers of the command line: python docs/make_commands.py"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from pulse_rl.cli import make_parser

PAGE = Path(__file__).parent / "commands.md"
_HEAD = """# Commands

Each command prints readable lines, or with `--json` one JSON object per result. Errors are one line
with a hint on stderr. A checkpoint is a `.safetensors` file, or a folder with `model.safetensors`
or with a sharded checkpoint and its index. `python docs/make_commands.py` generates this page.

| exit status | |
|---|---|
| 0 | success |
| 1 | refused or failed; `verify`, `store-check` or `status --stale` has found a problem |
| 2 | usage error |
| 130 | interrupted (Ctrl-C), at any time from the start on |
| 143 | ended by SIGTERM, as Kubernetes and systemd do; the work is left as by Ctrl-C |

`pulse follow` and `pulse relay` without `--once` go on for ever. At an error that may pass although
nobody changes the command they say once what they wait for and try again, after a time that grows
to 15 seconds. Such errors are `retryable` in [errors](reference/errors.md): a stream or a store's
folder that is not there yet (`empty_stream`, `not_found`), a store that is away
(`store_unavailable`), a full disk (`store_full`), a version that cannot be reached (`chain_gap`).
All others, such as a store that refuses access (`store`), a manifest that no trusted key has signed
(`untrusted`) or a setting that makes no sense (`input`), end them with exit status 1.
"""


def page() -> str:
    """The page as Markdown."""
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    return "\n".join(
        [
            _HEAD,
            *(
                line
                for name in helps
                for line in _section(name, helps[name], commands.choices[name])
            ),
        ]
    )


def _section(name: str, summary: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    # What a command is given comes first, and what every command takes last.
    actions = [action for action in parser._actions if action.dest != "help"]
    actions.sort(
        key=lambda action: (bool(action.option_strings), action.dest in ("json", "threads"))
    )
    yield f"## pulse {name}\n"
    yield f"{summary[:1].upper()}{summary[1:]}{'' if summary.endswith('?') else '.'}\n"
    usage = " ".join(map(_usage, actions))
    yield f"```\npulse {name} {usage}\n```\n"
    yield "| argument | meaning |\n|---|---|"
    for action in actions:
        words = ", ".join(action.option_strings) or str(
            action.metavar or ", ".join(action.choices or ())
        )
        yield f"| `{words}` | {action.help} |".replace("%%", "%")
    yield f"\n{(parser.epilog or '').capitalize().replace(': ', ': `', 1)}`\n"


def _usage(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else str(action.metavar or "|".join(action.choices or ()))
    if action.nargs == "+":
        value = f"{value} …"
    text = " ".join(part for part in (*action.option_strings[:1], value) if part)
    return text if action.required else f"[{text}]"


if __name__ == "__main__":
    PAGE.write_text(page())
