"""Whether the checkout may be released under a tag: python tools/check_release.py v1.2.3

The tag, the version in the package and the changelog's newest section, which needs a date, must
agree.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def problems(tag: str, package: str, changelog: str) -> list[str]:
    """What speaks against ``tag``, given the text of the package's __init__.py and of
    CHANGELOG.md."""
    found = re.search(r'^__version__ = "([^"]+)"$', package, re.MULTILINE)
    version = found[1] if found else "none"
    newest = re.search(r"^## (.*)$", changelog, re.MULTILINE)
    section = newest[1] if newest else "none"
    said = []
    if tag != f"v{version}":
        said.append(f"the tag is {tag}, the package's version is {version}")
    if not re.fullmatch(re.escape(version) + r" \(\d{4}-\d{2}-\d{2}\)", section):
        said.append(f'the changelog\'s newest section is "{section}", not "{version} (YYYY-MM-DD)"')
    return said


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    package = (CHECKOUT / "src/pulse_rl/__init__.py").read_text()
    found = problems(sys.argv[1], package, (CHECKOUT / "CHANGELOG.md").read_text())
    if found:
        sys.exit("\n".join(f"FAIL {problem}" for problem in found))
    print(f"ok   {sys.argv[1]} is the package's version and the changelog's newest section")


if __name__ == "__main__":
    main()
