"""Layout arithmetic against numpy's reshape of the ranks, over many sizes."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forge_core.errors import LayoutError
from forge_core.layout import DENSE, SIZES, SPARSE, Layout, divisors

size = st.sampled_from([1, 1, 2, 3])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = {axis: draw(size) for axis in DENSE}
    lenders = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    etp = draw(st.sampled_from([1, sizes["tp"]]))
    ep = draw(st.sampled_from([ep for ep in range(1, lenders + 1) if lenders % (ep * etp) == 0]))
    return Layout(**sizes, ep=ep, etp=etp)


@given(layouts())
def test_coordinates_and_groups_are_those_of_a_reshaped_range(layout: Layout) -> None:
    for view in (DENSE, SPARSE):
        shape = [layout.size(axis) for axis in view]
        grid = np.arange(layout.world).reshape(shape)
        for rank in range(layout.world):
            at = layout.coordinates(rank)
            assert grid[tuple(at[axis] for axis in view)] == rank
        for position, axis in enumerate(view):
            lines = np.moveaxis(grid, position, -1).reshape(-1, shape[position])
            assert {tuple(line) for line in lines.tolist()} == set(layout.groups([axis]))
    first, last = DENSE[1], DENSE[2]
    planes = np.moveaxis(np.arange(layout.world).reshape([layout.size(a) for a in DENSE]), (1, 2), (-2, -1))
    expected = {tuple(plane) for plane in planes.reshape(-1, layout.size(first) * layout.size(last)).tolist()}
    assert set(layout.groups([first, last])) == expected


@given(layouts())
def test_every_data_rank_reads_its_own_share(layout: Layout) -> None:
    grid = np.arange(layout.world).reshape(layout.pp, layout.dp_replicate * layout.dp_shard, layout.cp * layout.tp)
    for share in range(layout.data):
        assert {layout.data_rank(int(rank)) for rank in grid[:, share].flat} == {share}


@given(layouts())
def test_sparse_view_has_the_same_ranks(layout: Layout) -> None:
    assert layout.efsdp * layout.ep * layout.etp == layout.dp_shard * layout.cp * layout.tp
    assert layout.pp * layout.dp_replicate * layout.efsdp * layout.ep * layout.etp == layout.world


@given(layouts())
def test_strings_and_tables_give_the_layout_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert Layout.of(layout.sizes(), layout.world) == layout
    assert Layout.of({**layout.sizes(), "dp_shard": -1}, layout.world) == layout


@given(st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3, 5]) for axis in SIZES}), st.integers(1, 64))
def test_fault_34_sizes_that_do_not_fit_are_refused_with_sizes_that_do(sizes: dict[str, int], world: int) -> None:
    product = int(np.prod([sizes[axis] for axis in DENSE]))
    lenders = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    legal = product == world and lenders % (sizes["ep"] * sizes["etp"]) == 0 and sizes["etp"] in (1, sizes["tp"])
    if legal:
        assert Layout.of(sizes, world).world == world
        return
    with pytest.raises(LayoutError) as caught:
        Layout.of(sizes, world)
    if product != world:
        others = product // sizes["dp_shard"]
        assert (f"dp_shard = {world // others}" if world % others == 0 else f"multiples of {others}") in str(caught.value)


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_expert_sizes_named_as_legal_are_exactly_the_legal_ones(dp: int, ep: int) -> None:
    assume(dp % ep)
    with pytest.raises(LayoutError) as caught:
        Layout(dp_shard=dp, ep=ep)
    legal, multiple = str(caught.value).split("etp = 1: ")[1].split("; ")
    named = [int(word) for word in legal.split(", ")]
    assert named == [value for value in range(1, dp + 1) if dp % value == 0] == divisors(dp)
    for value in named:
        assert Layout(dp_shard=dp, ep=value).world == dp
    assert Layout(dp_shard=3 * int(multiple.split()[-1]), ep=ep).ep == ep


@pytest.mark.parametrize(
    ("text", "world"),
    [("1", 1), ("dp4ep2", 4), ("hsdp2x2", 4), ("pp2dp2tp2", 8), ("dp2cp2ep4", 4), ("tp2etp2dp2", 4), ("pp3hsdp2x2tp2", 24)],
)
def test_layout_strings_count_ranks(text: str, world: int) -> None:
    assert Layout.parse(text).world == world


@pytest.mark.parametrize("text", ["", "dp", "dp2dp2", "dp2hsdp2x2", "2dp", "dp2 tp2", "xp2", "dp0", "dp-1", "hsdp2", "dp2ep3"])
def test_other_strings_are_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.parse(text)


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"tp": -1}, {"dp_shard": -2}, {"xp": 2}, {"etp": 2}, {"tp": 4, "etp": 2}])
def test_other_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(LayoutError):
        Layout.of({"dp_shard": -1, **sizes}, 8)
    with pytest.raises(LayoutError):
        Layout.of(sizes, 0)


def test_ranks_and_axes_outside_are_refused() -> None:
    with pytest.raises(LayoutError):
        Layout().coordinates(1)
    with pytest.raises(LayoutError):
        Layout().size("xp")
    with pytest.raises(LayoutError):
        list(Layout().groups(["tp", "ep"]))
