"""A tag is released only if the package and the changelog say the same version."""

from __future__ import annotations

import pytest

from tools.check_release import problems


@pytest.mark.parametrize(
    ("tag", "package", "section", "said"),
    [
        ("v1.2.3", '__version__ = "1.2.3"', "1.2.3 (2026-11-30)", []),
        ("1.2.3", '__version__ = "1.2.3"', "1.2.3 (2026-11-30)", ["the tag is 1.2.3"]),
        ("v1.2.4", '__version__ = "1.2.3"', "1.2.3 (2026-11-30)", ["the tag is v1.2.4"]),
        ("v1.2.3", '__version__ = "1.2.3"', "1.2.3 (unreleased)", ["the changelog"]),
        ("v1.2.3", '__version__ = "1.2.3"', "1.2.2 (2026-11-30)", ["the changelog"]),
        ("v1.2.3", "", "", ["the tag is", "the changelog"]),
    ],
)
def test_what_speaks_against_a_release(
    tag: str, package: str, section: str, said: list[str]
) -> None:
    changelog = f"# Changelog\n\n## {section}\n\n* text\n\n## 1.2.3 (2020-01-01)\n"
    found = problems(tag, f'"""Doc."""\n{package}\n', changelog)
    assert len(found) == len(said)
    assert all(problem.startswith(start) for problem, start in zip(found, said, strict=True))
