"""Initial weights depend on seed and name only, whatever the box."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.specs import Init, TensorSpec
from forge_parallel.model import realize
from forge_parallel.model.realize import BLOCK, fill
from forge_parallel.placement.boxes import Box

NORMAL = TensorSpec((None, None), Init("normal", 0.02), "matrix")


def filled(
    shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...], spec: TensorSpec = NORMAL, seed: int = 3
) -> torch.Tensor:
    local = torch.full(size, torch.nan)
    fill(Box(shape, offset, local), spec, "w", seed)
    return local


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_box_is_the_same_part_of_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3)))
    offset = tuple(data.draw(st.integers(0, size)) for size in shape)
    extent = tuple(data.draw(st.integers(0, size - start)) for size, start in zip(shape, offset, strict=True))
    whole = filled(shape, (0,) * len(shape), shape)
    region = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
    assert torch.equal(filled(shape, offset, extent), whole[region])


@pytest.mark.parametrize("slab", [BLOCK, 3 * BLOCK, 10])
def test_the_slab_size_changes_nothing(monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    shape = (7, 13, 1500)
    whole = filled(shape, (0, 0, 0), shape)
    monkeypatch.setattr(realize, "SLAB", slab)
    assert torch.equal(filled(shape, (2, 0, 5), (4, 13, 100)), whole[2:6, :, 5:105])


def test_draws_are_those_of_numpy_with_the_stated_key_and_counter() -> None:
    from hashlib import blake2b

    key = int.from_bytes(blake2b(b"3/w", digest_size=16).digest(), "little")
    blocks = [
        np.random.Generator(np.random.Philox(key=key, counter=[0, 0, b, 0])).standard_normal(BLOCK, np.float32) for b in (0, 1)
    ]
    expected = torch.from_numpy(np.concatenate(blocks))[:70_000] * 0.02
    assert torch.equal(filled((70_000,), (0,), (70_000,)), expected)


def test_only_touched_blocks_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    philox = np.random.Philox
    monkeypatch.setattr(np.random, "Philox", lambda key, counter: drawn.append(counter[2]) or philox(key=key, counter=counter))
    filled((64 * BLOCK,), (5 * BLOCK + 1,), (BLOCK,))
    assert drawn == [5, 6]


def test_moments_and_independence() -> None:
    a, b = filled((400, 500), (0, 0), (400, 500)), filled((400, 500), (0, 0), (400, 500), seed=4)
    n = a.numel()
    assert abs(a.mean()) < 5 * 0.02 / n**0.5
    assert abs(a.std() / 0.02 - 1) < 5 / (2 * n) ** 0.5
    assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 5 / n**0.5
    blocks = a.flatten()[: 3 * BLOCK].view(3, BLOCK)
    assert abs(torch.corrcoef(blocks) - torch.eye(3)).max() < 5 / BLOCK**0.5


def test_stacked_experts_are_keyed_one_by_one() -> None:
    spec = TensorSpec(("expert", None, None), Init("normal", 0.02), "matrix", stacked=True)
    whole = filled((4, 3, 5), (0, 0, 0), (4, 3, 5), spec)
    assert torch.equal(filled((4, 3, 5), (2, 0, 0), (2, 3, 5), spec), whole[2:])
    assert torch.equal(filled((8, 3, 5), (0, 0, 0), (4, 3, 5), spec), whole), "more experts leave the first ones alone"
    one = torch.empty(3, 5)
    fill(Box((3, 5), (0, 0), one), NORMAL, "w[2]", 3)
    assert torch.equal(whole[2], one)


def test_constants_and_rounding() -> None:
    ones = TensorSpec((None,), Init("ones"), "vector")
    assert torch.equal(filled((3,), (0,), (3,), ones), torch.ones(3))
    low = torch.empty(1000, dtype=torch.bfloat16)
    fill(Box((1000,), (0,), low), NORMAL, "w", 3)
    assert torch.equal(low, filled((1000,), (0,), (1000,)).bfloat16())
