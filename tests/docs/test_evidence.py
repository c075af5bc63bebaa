"""The page of pictures says what its logs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import charts, make_evidence


def test_the_page_and_its_pictures_are_made_from_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = charts.FOLDER
    (tmp_path / "evidence.in").write_text((docs / "evidence.in").read_text())
    monkeypatch.setattr(charts, "FOLDER", tmp_path)
    make_evidence.main()
    made = [path for path in tmp_path.iterdir() if path.suffix in (".md", ".svg")]
    assert len(made) >= 9
    for path in made:
        assert path.read_text() == (docs / path.name).read_text(), (
            f"{path.name}: python -m docs.make_evidence"
        )
    assert "{" not in (tmp_path / "evidence.md").read_text()


def test_the_time_of_an_exchange_is_fitted_by_what_was_measured() -> None:
    found = make_evidence.exchange_time("a link", [(x, 0.5 + 1e-6 * x) for x in (1e3, 1e6, 1e8)])
    assert found.fixed == pytest.approx(0.5)
    assert found.a_byte == pytest.approx(1e-6)
    assert found.off < 1e-6
    run = {"sync_every": 8, "links": [8e6, 16e6]}
    assert found.seconds({"method": "DiLoCo", **run}) == pytest.approx([8.5, 16.5])
    assert found.seconds({"method": "DDP", **run}) == pytest.approx([12, 20])
    assert make_evidence.along({"method": "DiLoCo", **run}, found, 60 / 8) == pytest.approx(
        [68.5 / 60, 145 / 60]
    )
    less = make_evidence.exchange_time("a link", [(1e6, 0.5), (2e6, 2.0)])
    assert less.fixed == 0, "no exchange begins before it is asked for"
    assert less.off == pytest.approx(0.4)
