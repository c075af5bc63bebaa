"""The page of pictures says what its logs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import make_evidence


def test_the_page_and_its_pictures_are_made_from_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = make_evidence.FOLDER
    (tmp_path / "evidence.in").write_text((docs / "evidence.in").read_text())
    monkeypatch.setattr(make_evidence, "FOLDER", tmp_path)
    make_evidence.main()
    made = [path for path in tmp_path.iterdir() if path.suffix in (".md", ".svg")]
    assert len(made) >= 9
    for path in made:
        assert path.read_text() == (docs / path.name).read_text(), f"{path.name}: python docs/make_evidence.py"
    assert "{" not in (tmp_path / "evidence.md").read_text()
