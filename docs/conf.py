"""The documentation site, `make docs`. A name in single backticks is a reference; one that leads
nowhere fails it."""

from __future__ import annotations

import inspect
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import Config as NapoleonConfig
from sphinx.ext.napoleon import GoogleDocstring

from pulse_rl import __version__

project = "Pulse"
author = "The Pulse developers"
copyright = "The Pulse developers, Apache-2.0"  # noqa: A001
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"Pulse {__version__}"
html_extra_path: list[str] = []
exclude_patterns = ["_build"]
default_role = "py:obj"
nitpicky = True

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["axolotl", "nemo_rl", "verl"]
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "exclude-members": "__new__, __init__",
}
# Aliases and types of other libraries, whose documentation is not at hand when this one is built.
nitpick_ignore_regex = [
    (
        r"py:class",
        r"pulse_rl\..*\.(Publisher|Subscriber|Update)(Settings|Options)",
    ),  # keywords that a call hands on
    (
        r"py:.*",
        r"(numpy|np|npt|torch|dist|msgspec|prometheus_client|collections|typing|os|pathlib|abc|axolotl|nemo_rl|verl)\b.*",
    ),
    (
        r"py:.*",
        r"(Any|Self|DTypeLike|Files|Quantize|Past|Path|Mapping|Iterator|Iterable|Callable|Sequence|Collection|TracebackType|ClassVar|PathLike|CollectorRegistry)",
    ),
]


def resolve(
    app: Sphinx, env: BuildEnvironment, node: Any, content: nodes.TextElement
) -> nodes.Node | None:
    """A reference by a name's last part, where only one object of the public interface has it."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].lstrip(".~")
    domain = env.get_domain("py")
    found = {
        entry.docname: key
        for key, entry in domain.data["objects"].items()
        if f".{key}".endswith(f".{name}")
    }
    keys = sorted(set(found.values()), key=len)
    if not keys:
        return None
    entry = domain.data["objects"][keys[0]]
    return (
        domain.resolve_xref(env, node["refdoc"], app.builder, "obj", keys[0], node, content)
        if entry
        else None
    )


def parameter_lists(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Makes entries of the lists of arguments, of the sentences that begin with a parameter's name,
    and of those that say what is raised."""
    if any(re.match("(Args|Returns|Raises):", line) for line in lines):
        # "Returns: text" and "Raises: text" may be sentences of their own, of several lines.
        text = re.sub(r"^Returns: (.+)", r"Returns:\n    \1", "\n".join(lines), flags=re.MULTILINE)
        sentence = re.compile(r"^Raises: .+(?:\n +.+)*", re.MULTILINE)
        text = sentence.sub(lambda found: "\n" + " ".join(found[0].split()) + "\n", text)
        lines[:] = text.split("\n")
        config = NapoleonConfig(napoleon_use_param=True, napoleon_use_rtype=False)
        lines[:] = str(GoogleDocstring(lines, config, app, what, name, obj, options)).split("\n")
        return
    try:
        parameters = inspect.signature(obj).parameters
    except (TypeError, ValueError):
        return
    begins = re.compile(
        rf"(?:^|(?<=[.;)] ))``({'|'.join(parameters)})``(?:: |(?= ))|(?:^|(?<=\. ))(Raises) "
    )
    paragraphs, entries = "\n".join(lines).split("\n\n"), []
    for at, paragraph in enumerate(paragraphs):
        text = " ".join(paragraph.split())
        found = (
            list(begins.finditer(text))
            if parameters and not paragraph.startswith((" ", "*", "-"))
            else []
        )
        if not any(match[1] for match in found):
            continue
        paragraphs[at] = text[: found[0].start()]
        for match, end in zip(
            found, [*(match.start() for match in found[1:]), len(text)], strict=True
        ):
            field = f":param {match[1]}:" if match[1] else ":raises:"
            entries.append(f"{field} {text[match.end() : end].strip()}")
    if entries:
        entries.sort(key=lambda entry: entry.startswith(":raises"))
        lines[:] = "\n\n".join([*filter(None, paragraphs), "\n".join(entries), ""]).splitlines()


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", parameter_lists)
    app.connect("missing-reference", resolve)
