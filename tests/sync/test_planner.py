"""Planning: the cheapest way to a version, or an error that names both sides of the gap."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_rl.errors import ChainGap
from pulse_rl.stream.manifest import AnchorRef, Link, PatchRef, Payload, links_of
from pulse_rl.sync.planner import cheapest_path
from tests.support.manifests import FULL


def link(base: int | None, version: int, nbytes: int = 1) -> Link:
    return Link(base, version, nbytes, (Payload(f"{nbytes:064x}", nbytes),))


CHAIN = [link(None, 0, 100), *(link(k, k + 1) for k in range(9))]


@pytest.mark.parametrize(
    ("missing", "have", "reached"),
    [
        ((4, 5), None, "the chain reaches version 4"),
        ((4, 5), 2, "the chain reaches version 4"),
        ((None, 0), None, "nothing below it is reachable"),
        ((2, 3), 2, "the chain reaches version 2"),
    ],
)
def test_a_gap_names_both_sides(
    missing: tuple[int | None, int], have: int | None, reached: str
) -> None:
    links = [x for x in CHAIN if (x.base, x.version) != missing]
    with pytest.raises(ChainGap, match=f"version 7: {reached}"):
        cheapest_path(links, have, 7)


def test_a_version_nobody_knows_is_a_gap() -> None:
    with pytest.raises(ChainGap, match="version 12: the chain reaches version 9"):
        cheapest_path(CHAIN, 3, 12)


def brute_force(links: list[Link], have: int | None, target: int) -> int | None:
    """The bytes of the cheapest path, by trying all of them."""
    costs = [0] if target == have else []

    def walk(at: int | None, cost: int) -> None:
        for x in links:
            if x.base == at and x.version != have:
                if x.version == target:
                    costs.append(cost + x.nbytes)
                walk(x.version, cost + x.nbytes)

    walk(None, 0)
    if have is not None:
        walk(have, 0)
    return min(costs, default=None)


@st.composite
def graphs(draw: st.DrawFn) -> list[Link]:
    found = []
    for _ in range(draw(st.integers(0, 9))):
        version = draw(st.integers(0, 6))
        base = draw(st.one_of(st.none(), st.integers(0, version - 1))) if version else None
        found.append(link(base, version, draw(st.integers(1, 20))))
    return found


@settings(max_examples=10 * settings.default.max_examples)
@given(graphs(), st.one_of(st.none(), st.integers(0, 6)), st.integers(0, 6))
def test_paths_are_as_cheap_as_by_brute_force(
    links: list[Link], have: int | None, target: int
) -> None:
    best = brute_force(links, have, target)
    if best is None:
        with pytest.raises(ChainGap):
            cheapest_path(links, have, target)
        return
    path = cheapest_path(links, have, target)
    assert sum(x.nbytes for x in path) == best
    assert set(path) <= set(links)
    ends = [have if path and path[0].base is not None else None, *(x.version for x in path)]
    assert [x.base for x in path] == ends[:-1]
    assert not path or path[-1].version == target


def test_links_of_a_manifest() -> None:
    patch = PatchRef(3, "a" * 64, 7, (Payload("b" * 64, 10), Payload("c" * 64, 20)))
    anchor = AnchorRef((Payload("d" * 64, 100),))

    def links(patch: PatchRef | None, anchor: AnchorRef | None) -> list[Link]:
        return links_of(msgspec.structs.replace(FULL, version=4, patch=patch, anchor=anchor))

    assert links(patch, None) == [Link(3, 4, 30, patch.parts)]
    assert links(None, anchor) == [Link(None, 4, 100, anchor.shards)]
    both = links(patch, anchor)
    assert [x.nbytes for x in both] == [30, 100]
    assert [str(x) for x in both] == ["the patch 3->4", "the anchor of version 4"]
