"""`ckpt diff`, against numpy on the same values."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from typer.testing import CliRunner

from ckpt.ranks import box, on_ranks, sample, whole
from forge_ckpt import difference
from forge_ckpt.checkpoint.read import boxes
from forge_ckpt.checkpoint.save import save
from forge_ckpt.commands import app
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld

META = {"config": {"model": {"dim": 4, "tags": ["a", "b"]}, "optimizer": {"lr": 0.1}}, "tokens": 5}


def stored(root: Path, state: dict[str, torch.Tensor], meta: Any = META, step: int = 1) -> Path:
    save(LocalStore(root), whole(state), meta, step, SingleProcessWorld())
    return root


def diff(*arguments: object) -> tuple[int, Any]:
    result = CliRunner().invoke(app, ["diff", *map(str, arguments), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout) if result.exit_code < 2 else result.output


def test_equal_checkpoints_are_equal_in_any_layout(tmp_path: Path) -> None:
    state = sample()
    stored(tmp_path / "a", state)
    full = state["model/embed.weight"]

    def saving(world: Any) -> str:
        mine = [box("model/embed.weight", full, (20 * world.rank, 0), (20 * world.rank + 20, 12))]
        rest = whole({name: tensor for name, tensor in state.items() if name != "model/embed.weight"})
        return save(LocalStore(tmp_path / "b"), mine + (rest if world.rank else []), META, 1, world)

    assert on_ranks(2, saving) == ["step-00000001"] * 2
    code, found = diff(tmp_path / "a", tmp_path / "b/step-00000001")
    assert code == 0 and found["same"] and found["equal"] == 4 and found["facts"] == {} and found["values"] == []


def test_values_are_those_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference, "PORTION", 50)
    generator = torch.Generator().manual_seed(1)
    a = {"w": torch.randn(30, 7, generator=generator), "i": torch.arange(12), "same": torch.full((3,), torch.nan)}
    b = {name: tensor.clone() for name, tensor in a.items()}
    b["w"][torch.rand(30, 7, generator=generator) < 0.3] *= 1.01
    b["w"][4, 5] = -5.0
    b["i"][3] = 90
    code, found = diff(stored(tmp_path / "a", a), stored(tmp_path / "b", b))
    assert code == 1 and found["equal"] == 1
    for entry in found["values"]:
        left, right = a[entry["name"]].double().numpy(), b[entry["name"]].double().numpy()
        apart = np.abs(left - right)
        size = np.maximum(np.abs(left), np.abs(right))
        assert entry["elements"] == left.size and entry["differing"] == int((left != right).sum())
        assert entry["share"] == (left != right).mean() and entry["absolute"] == apart.max()
        assert entry["relative"] == pytest.approx((apart[apart > 0] / size[apart > 0]).max(), rel=1e-15)
        assert entry["not_finite"] == 0
    assert {entry["name"] for entry in found["values"]} == {"w", "i"}


def test_bits_are_compared_and_infinities_counted_apart(tmp_path: Path) -> None:
    a = {"w": torch.tensor([0.0, 1.0, torch.inf, torch.nan, 2.0]), "c": torch.tensor([1 + 1j, 2]), "h": torch.ones(3).bfloat16()}
    b = {"w": torch.tensor([-0.0, torch.nan, -torch.inf, torch.nan, 2.5]), "c": torch.tensor([1 + 1j, 2 + 3j]), "h": a["h"]}
    _, found = diff(stored(tmp_path / "a", a), stored(tmp_path / "b", b))
    entries = {entry["name"]: entry for entry in found["values"]}
    assert entries["w"] | {"share": 0} == {
        "name": "w", "elements": 5, "differing": 4, "absolute": 0.5, "relative": 0.2, "not_finite": 2, "share": 0
    }  # fmt: skip
    assert entries["c"]["absolute"] == 3.0 and entries["c"]["differing"] == 1
    text = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "and 2 not finite" in text.stdout and "1 of 3 tensors" in text.stdout and text.exit_code == 1


def test_names_forms_and_facts(tmp_path: Path) -> None:
    a, b = sample(), sample()
    b["new"] = a.pop("optimizer/mask")
    b["model/head.weight"] = b["model/head.weight"].float()
    del b["optimizer/mask"]
    other = {"config": {"model": {"dim": 4.0, "tags": ["a"]}, "optimizer": {"lr": 0.2}}, "tokens": 5, "extra": []}
    code, found = diff(stored(tmp_path / "a", a), stored(tmp_path / "b", b, other, 9))
    assert code == 1 and found["only_a"] == [] and found["only_b"] == ["new"] and found["values"] == []
    assert found["forms"] == [["model/head.weight", "bfloat16 [12, 40]", "float32 [12, 40]"]]
    assert found["facts"] == {
        "config.model.dim": {"a": 4, "b": 4.0},
        "config.model.tags.1": {"a": "b"},
        "config.optimizer.lr": {"a": 0.1, "b": 0.2},
        "extra": {"b": []},
    }
    stored(tmp_path / "c", a, other)
    assert diff(tmp_path / "a", tmp_path / "c")[0] == 1
    assert diff(tmp_path / "a", tmp_path / "c", "--only-tensors")[0] == 0


def test_only_on_one_side_is_said_of_both_sides(tmp_path: Path) -> None:
    a, b = sample(), sample()
    a["left"] = b["right"] = torch.ones(1)
    result = CliRunner().invoke(app, ["diff", str(stored(tmp_path / "a", a)), str(stored(tmp_path / "b", b))])
    assert "only in a: left" in result.stdout and "only in b: right" in result.stdout and result.exit_code == 1


def test_fault_5_a_damaged_checkpoint_is_not_compared(tmp_path: Path) -> None:
    for name in "ab":
        stored(tmp_path / name, sample())
    file = tmp_path / "b/step-00000001/rank-00000.bin"
    file.write_bytes(b"\7" + file.read_bytes()[1:])
    code, text = diff(tmp_path / "a", tmp_path / "b")
    assert code == 2 and "checksum mismatch" in text
    assert diff(tmp_path / "a", tmp_path / "nowhere")[0] == 2


@given(some.lists(some.integers(0, 6), max_size=4), some.integers(1, 40))
def test_boxes_cover_a_shape_once_and_are_small(shape: list[int], most: int) -> None:
    count = torch.zeros(shape)
    for offset, extent in boxes(shape, most):
        part = count[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]
        assert part.shape == extent and 0 < part.numel() <= most
        part += 1
    assert bool((count == 1).all())
