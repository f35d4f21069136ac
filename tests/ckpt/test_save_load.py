"""What was saved comes back, bit for bit, on any layout; what does not fit changes nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.ranks import blank, box, digest, equal, on_ranks, sample, shards, whole
from forge_ckpt.checkpoint.read import load, newest
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format.tensor_bytes import DTYPES
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece

META = {"cursor": 12345678901234567, "rate": 0.1, "name": "naïve", "list": [1, None, True], "nested": {"a": {}}}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_bit_pattern(tmp_path: Path, name: str) -> None:
    raw = torch.randint(0, 2 if name == "bool" else 256, (48 * 16,), dtype=torch.uint8)
    values = raw[: 48 * DTYPES[name].itemsize].view(DTYPES[name]).reshape(6, 8)
    store = LocalStore(tmp_path / "c")
    save(
        store,
        whole({"t": values, "transposed": values.t(), "scalar": values[3, 5], "none": values[:, :0]}),
        {},
        1,
        SingleProcessWorld(),
    )
    state = {"t": values.clone(), "transposed": values.t().contiguous(), "scalar": values[3, 5].clone(), "none": values[:, :0]}
    live = blank(state)
    load(store, 1, whole(live), SingleProcessWorld())
    for key, tensor in state.items():
        assert digest([live[key]]) == digest([tensor]), key


def test_round_trip_with_meta_and_parameters(tmp_path: Path) -> None:
    store, state = LocalStore(tmp_path / "c"), sample()
    assert save(store, whole(state), META, 100, SingleProcessWorld()) == "step-00000100"
    live = {name: torch.nn.Parameter(t, requires_grad=t.is_floating_point()) for name, t in blank(state).items()}
    assert load(store, 100, whole(live), SingleProcessWorld()) == META
    assert equal({name: t.data for name, t in live.items()}, state)
    found = newest(store, SingleProcessWorld())
    assert found is not None and (found.step, found.meta, found.skipped) == (100, META, ())
    assert (tmp_path / "c/latest").read_text() == "step-00000100\n"


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_fault_19_any_layout_to_any_layout(tmp_path_factory, data) -> None:
    """Random boxes saved, random boxes loaded; numpy slicing of the global array is the authority."""
    shape = tuple(data.draw(st.lists(st.integers(1, 11), min_size=1, max_size=3)))
    full = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=shape).astype(np.float32)
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(data.draw(st.integers(0, 6))):
        at, dim = data.draw(st.integers(0, len(boxes) - 1)), data.draw(st.integers(0, len(shape) - 1))
        low, high = boxes[at]
        if high[dim] - low[dim] > 1:
            cut = data.draw(st.integers(low[dim] + 1, high[dim] - 1))
            middle, start = list(high), list(low)
            middle[dim] = start[dim] = cut
            boxes[at : at + 1] = [(low, middle), (start, high)]
    ranks = data.draw(st.integers(1, 3))
    owners = [data.draw(st.integers(0, ranks - 1)) for _ in boxes]
    source = torch.from_numpy(full)

    def saving(world):
        pieces = [box("t", source, *b, owned=o == world.rank) for b, o in zip(boxes, owners, strict=True)]
        return save(store, pieces, {}, 1, world)

    store = LocalStore(tmp_path_factory.mktemp("any") / "c")
    assert on_ranks(ranks, saving) == ["step-00000001"] * ranks
    low = [data.draw(st.integers(0, size - 1)) for size in shape]
    high = [data.draw(st.integers(start + 1, size)) for start, size in zip(low, shape, strict=True)]
    wanted = full[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
    plain = torch.zeros(wanted.shape)
    strided = torch.zeros(tuple(reversed(wanted.shape))).permute(*reversed(range(len(shape))))
    load(store, 1, [Piece("t", shape, tuple(low), live, True) for live in (plain, strided)], SingleProcessWorld())
    assert np.array_equal(plain.numpy(), wanted) and np.array_equal(strided.numpy(), wanted)


def test_fault_19_four_ranks_to_two_to_one_and_across_dimensions(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    full = {"a": torch.randn(10, 6, generator=generator), "b": torch.randn(3, 7, generator=generator).bfloat16()}
    store = LocalStore(tmp_path / "c")

    def saving(world):
        pieces = [shards("a", full["a"], 0, 4)[world.rank], shards("b", full["b"], 0, 4)[world.rank]]
        return save(store, pieces, {"by": "four"}, 7, world)

    on_ranks(4, saving)
    again = LocalStore(tmp_path / "d")

    def moving(world):
        mine = [shards(name, torch.zeros_like(full[name]), 1, 2)[world.rank] for name in full]
        meta = load(store, 7, mine, world)
        for piece in mine:
            assert torch.equal(piece.local, shards(piece.name, full[piece.name], 1, 2)[world.rank].local)
        return meta, save(again, mine, meta, 8, world)

    assert on_ranks(2, moving) == [({"by": "four"}, "step-00000008")] * 2
    live = blank(full)
    load(again, 8, whole(live), SingleProcessWorld())
    assert equal(live, full)


def test_replicas_are_written_once_and_loaded_everywhere(tmp_path: Path) -> None:
    state, store = sample(), LocalStore(tmp_path / "c")

    def saving(world):
        pieces = [Piece(p.name, p.shape, p.offset, p.local, world.rank == 1) for p in whole(state)]
        save(store, pieces, {}, 1, world)
        live = blank(state)
        load(store, 1, [Piece(p.name, p.shape, p.offset, p.local, world.rank == 0) for p in whole(live)], world)
        return equal(live, state)

    assert on_ranks(3, saving) == [True] * 3
    total = sum(t.numel() * t.element_size() for t in state.values())
    assert [path.name for path in sorted((tmp_path / "c/step-00000001").glob("*.bin"))] == ["rank-00001.bin"]
    assert (tmp_path / "c/step-00000001/rank-00001.bin").stat().st_size == total


def test_fault_22_all_that_does_not_fit_is_one_error_and_changes_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "c")
    save(store, whole(sample()), {}, 1, SingleProcessWorld())
    live = {
        "model/embed.weight": torch.ones(40, 13),
        "model/head.weight": torch.ones(12, 40),
        "model/new.weight": torch.ones(3),
        "optimizer/step": torch.ones((), dtype=torch.int64),
    }
    before = digest(list(live.values()))
    with pytest.raises(CheckpointError) as caught:
        load(store, 1, whole(live), SingleProcessWorld())
    text = str(caught.value)
    for part in (
        "model/embed.weight: shape (40, 13), in the checkpoint (40, 12)",
        "model/head.weight: dtype float32, in the checkpoint bfloat16",
        "model/new.weight: not in the checkpoint",
        "optimizer/mask: in the checkpoint, but not",
    ):
        assert part in text
    assert digest(list(live.values())) == before


def test_fault_22_a_misfit_on_one_rank_stops_all(tmp_path: Path) -> None:
    store, state = LocalStore(tmp_path / "c"), sample()
    save(store, whole(state), {}, 1, SingleProcessWorld())

    def loading(world):
        live = blank(state)
        if world.rank == 1:
            live["model/head.weight"] = torch.zeros(5)
        try:
            load(store, 1, whole(live), world)
        except CheckpointError as cause:
            return str(cause), digest([live["model/embed.weight"]])

    assert len(set(on_ranks(3, loading))) == 1


def test_weights_only(tmp_path: Path) -> None:
    store, state = LocalStore(tmp_path / "c"), sample()
    save(store, whole(state), {}, 1, SingleProcessWorld())
    weights = {name: t for name, t in blank(state).items() if name.startswith("model/")}
    with pytest.raises(CheckpointError, match="not in the model"):
        load(store, 1, whole(weights), SingleProcessWorld())
    load(store, 1, whole(weights), SingleProcessWorld(), strict=False)
    assert equal(weights, {name: state[name] for name in weights})
    everything = blank(state)
    load(store, 1, whole(everything), SingleProcessWorld(), select=lambda name: name.startswith("model/"))
    assert torch.equal(everything["model/embed.weight"], state["model/embed.weight"])
    assert int(everything["optimizer/step"]) == 0


def test_fault_6_same_step_twice_gives_the_second_and_removes_the_first(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "c")
    save(store, whole(sample(1)), {"n": 1}, 5, SingleProcessWorld(), keep=3)
    assert save(store, whole(sample(2)), {"n": 2}, 5, SingleProcessWorld(), keep=3) == "step-00000005-g2"
    live = blank(sample(2))
    assert load(store, 5, whole(live), SingleProcessWorld()) == {"n": 2} and equal(live, sample(2))
    assert [name for name in store.list() if name.startswith("step")] == ["step-00000005-g2"]


def test_going_back_leaves_the_later_history_aside(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "c")
    for step in (10, 20, 30):
        save(store, whole(sample(step)), {}, step, SingleProcessWorld())
    save(store, whole(sample(99)), {"again": True}, 20, SingleProcessWorld(), keep=1)
    found = newest(store, SingleProcessWorld())
    assert found is not None and (found.step, found.meta) == (20, {"again": True})
    assert "superseded-step-00000030" in store.list()


@pytest.mark.parametrize("keep", [0, 1, 2, 5])
def test_retention_keeps_the_newest(tmp_path: Path, keep: int) -> None:
    store = LocalStore(tmp_path / "c")
    for step in (1, 2, 3, 4):
        save(store, whole(sample(step)), {}, step, SingleProcessWorld(), keep=keep)
    left = [int(name[5:]) for name in store.list() if name.startswith("step")]
    assert left == [1, 2, 3, 4][-keep:]


@pytest.mark.parametrize(
    ("meta", "place"),
    [
        ({"a": {1: 2}}, "meta.a has key 1"),
        ({"a": [0.0, float("nan")]}, r"meta.a\[1\] is nan"),
        ({"a": torch.ones(1)}, "Tensor"),
    ],
)
def test_meta_that_json_would_change_is_refused_before_anything_is_written(tmp_path: Path, meta: dict, place: str) -> None:
    with pytest.raises(CheckpointError, match=place):
        save(LocalStore(tmp_path / "c"), whole(sample()), meta, 1, SingleProcessWorld())
    assert not (tmp_path / "c").exists()


def test_pieces_that_do_not_cover_are_refused(tmp_path: Path) -> None:
    store, full = LocalStore(tmp_path / "c"), torch.randn(8, 4)
    save(store, whole({"t": full}), {}, 1, SingleProcessWorld())
    cases = {
        "4 of 32 elements are not covered by any box": [box("t", full, [0, 0], [7, 4])],
        "overlap": [box("t", full, [0, 0], [5, 4]), box("t", full, [4, 0], [8, 4])],
        "32 of 32 elements": [box("t", full, [0, 0], [8, 4], owned=False)],  # nobody owns it
        "not inside shape": [Piece("t", (8, 4), (1, 0), full, True)],
        "two pieces disagree": [box("t", full, [0, 0], [4, 4]), box("t", full[:, :3], [4, 0], [8, 3])],
        "cannot be stored": [Piece("t", (2,), (0,), torch.empty(2, dtype=torch.bits8), True)],
        "meta": [Piece("t", (2,), (0,), torch.ones(2, device="meta"), True)],
    }
    for message, pieces in cases.items():
        with pytest.raises(CheckpointError, match=message):
            save(store, pieces, {}, 2, SingleProcessWorld())
    assert store.list() == ["forge-checkpoints", "latest", "step-00000001"]


def test_fault_45_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    state = sample()
    save(LocalStore(tmp_path / "c"), whole(state), META, 1, SingleProcessWorld())
    files = sorted(path.name for path in (tmp_path / "c/step-00000001").iterdir())
    assert files == ["manifest.json", "rank-00000.bin"]
    body = json.loads((tmp_path / "c/step-00000001/manifest.json").read_text())["manifest"]
    assert body["meta"] == META and [entry["name"] for entry in body["tensors"]] == list(state)
    raw = b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in state.values())
    assert (tmp_path / "c/step-00000001/rank-00000.bin").read_bytes() == raw
