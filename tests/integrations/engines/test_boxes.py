"""The algebra of boxes, against arrays of all indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_rl.integrations.engines.loader_map import Box

Array = npt.NDArray[np.int64]


@st.composite
def views(draw: st.DrawFn) -> tuple[Array, Array]:
    """(source, target): two views of one shape, made by slicing and transposing arrays of flat positions."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    cut = [slice(start := draw(st.integers(0, n - 1)), draw(st.integers(start + 1, n))) for n in shape]
    source = np.arange(np.prod(shape)).reshape(shape)[tuple(cut)]
    order = draw(st.permutations(range(len(shape))))
    outer = [n + draw(st.integers(0, 3)) for n in np.transpose(source, order).shape]
    target = np.arange(np.prod(outer)).reshape(outer)
    target = target[tuple(slice(m - n, m) for m, n in zip(outer, np.transpose(source, order).shape, strict=True))]
    return source, np.transpose(target, np.argsort(order))


def box_of(source: Array, target: Array) -> Box:
    def place(view: Array) -> tuple[int, list[int]]:
        return int(view.flat[0]), [stride // 8 for stride in view.strides]

    return Box.make("weight", source.shape, place(source), place(target))


@given(views(), st.data())
def test_changes_go_where_the_copy_put_their_elements(pair: tuple[Array, Array], data: Any) -> None:
    source, target = pair
    box = box_of(source, target)
    goes = dict(zip(source.flat, target.flat, strict=True))
    elements = int(source.max()) + 4
    indices = np.array(sorted(data.draw(st.sets(st.integers(0, elements), max_size=40))), np.int64)
    chosen, places = box.locate(indices)
    kept = indices[chosen]
    assert kept.tolist() == [i for i in indices.tolist() if i in goes]
    assert places.tolist() == [goes[i] for i in kept.tolist()]
    assert box.elements == source.size


@given(views(), st.data())
def test_the_parts_of_a_range_are_its_elements(pair: tuple[Array, Array], data: Any) -> None:
    source, target = pair
    goes = dict(zip(source.flat, target.flat, strict=True))
    start = data.draw(st.integers(0, int(source.max())))
    stop = data.draw(st.integers(start + 1, int(source.max()) + 2))
    found = {}
    for part in box_of(source, target).within(start, stop):
        for offsets in np.ndindex(part.sizes):
            here = part.source + sum(c * s for c, s in zip(offsets, part.source_strides, strict=True))
            assert here not in found
            found[here] = part.target + sum(c * s for c, s in zip(offsets, part.target_strides, strict=True))
    assert found == {i: t for i, t in goes.items() if start <= i < stop}


def test_a_whole_slice_of_rows_has_one_axis_and_one_of_columns_two() -> None:
    rows = box_of(np.arange(48).reshape(8, 6)[2:5], np.arange(60).reshape(10, 6)[4:7])
    assert (rows.sizes, rows.source, rows.target) == ((18,), 12, 24)
    columns = box_of(np.arange(48).reshape(8, 6)[:, 3:], np.arange(24).reshape(8, 3))
    assert columns.sizes == (8, 3)


def test_expanded_views_are_refused() -> None:
    with pytest.raises(ValueError, match="share a place"):
        Box.make("weight", (3, 4), (0, (0, 1)), (0, (4, 1)))
