"""`ckpt average`, against torch in fp64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from typer.testing import CliRunner

from ckpt.ranks import sample, whole
from forge_ckpt.average import of_ema
from forge_ckpt.checkpoint.read import StoredTensors
from forge_ckpt.checkpoint.save import save
from forge_ckpt.checkpoint.verification import open_manifest
from forge_ckpt.commands import app
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError

META = {"config": {"model": {"dim": 12}}, "hooks": [["ema", {}]], "tokens": 9}


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return sample(step) | {
        "model/wide": torch.randn(5, 3, generator=generator, dtype=torch.float64),
        "model/wave": torch.randn(4, generator=generator, dtype=torch.complex64),
        "model/tiny": torch.randn(9, generator=generator).to(torch.float8_e4m3fn),
        "model/count": torch.tensor([step, 2 * step]),
        "model/flag": torch.tensor(step % 2 == 0),
        "model/none": torch.empty(0, 3),
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save(LocalStore(tmp_path / "c"), whole(state(step)), META | {"tokens": step}, step, SingleProcessWorld())
    return tmp_path / "c"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["average", *map(str, arguments)])


def found(output: Path) -> dict[str, torch.Tensor]:
    store = LocalStore(output)
    opened = StoredTensors(store, "step-00000030")
    return {name: opened.whole(name) for name in opened.tensors}


def expected(shares: dict[int, float]) -> dict[str, torch.Tensor]:
    states = {step: state(step) for step in shares}
    made = {}
    for name, newest in states[max(states)].items():
        if not name.startswith("model/"):
            continue
        if not (newest.is_floating_point() or newest.is_complex()):
            made[name] = newest
            continue
        wide = torch.complex128 if newest.is_complex() else torch.float64
        stack = torch.stack([states[step][name].to(wide) for step in shares])
        made[name] = torch.einsum("s,s...->...", torch.tensor(list(shares.values()), dtype=wide), stack).to(newest.dtype)
    return made


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ((), {10: 1 / 3, 20: 1 / 3, 30: 1 / 3}),
        (("--weights", "1,0,3"), {10: 0.25, 20: 0.0, 30: 0.75}),
        (("--ema", "0.5"), {10: 0.25, 20: 0.25, 30: 0.5}),
    ],
)
def test_averages_are_those_of_torch(root: Path, options: tuple[str, ...], shares: dict[int, float]) -> None:
    output = root.parent / "out"
    result = run(root, 10, 20, 30, "--output", output, *options)
    assert result.exit_code == 0, result.output
    made, wanted = found(output), expected(shares)
    assert made.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert made[name].dtype == tensor.dtype and made[name].shape == tensor.shape
        if tensor.dtype == torch.float64:
            torch.testing.assert_close(made[name], tensor, rtol=1e-15, atol=1e-15)
        else:  # a sum in another order is rounded to the same value, but for one in millions
            torch.testing.assert_close(made[name].to(torch.complex64), tensor.to(torch.complex64), rtol=1e-7, atol=0)
    manifest = open_manifest(LocalStore(output), "step-00000030")[0]
    assert manifest.meta["tokens"] == 30 and manifest.meta["hooks"] == [] and manifest.meta["weights_only"] is True
    assert manifest.meta["averaged"] == {"steps": [10, 20, 30], "shares": list(shares.values())}
    assert [path.name for path in root.parent.iterdir() if path.name.startswith(".")] == [], "nothing is left next to it"


def test_an_ema_is_that_of_torch() -> None:
    module = torch.nn.Linear(3, 2).double()
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    weights = [torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    for weight in weights:
        with torch.no_grad():
            module.weight.copy_(weight)
        average.update_parameters(module)
    ours = sum(share * weight for share, weight in zip(of_ema(5, 0.8), weights, strict=True))
    torch.testing.assert_close(ours, average.module.weight.detach(), rtol=1e-14, atol=1e-14)


def test_the_order_of_an_ema_is_that_of_steps(root: Path) -> None:
    for name, steps in (("a", (10, 20, 30)), ("b", (30, 10, 20))):
        assert run(root, *steps, "--output", root.parent / name, "--ema", "0.9").exit_code == 0
    a, b = found(root.parent / "a"), found(root.parent / "b")
    assert all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a if a[name].dim())


def test_facts_and_counters_are_those_of_the_newest_in_any_order(root: Path) -> None:
    assert run(root, 30, 10, "--output", root.parent / "out").exit_code == 0
    assert found(root.parent / "out")["model/count"].tolist() == [30, 60]
    assert open_manifest(LocalStore(root.parent / "out"), "step-00000030")[0].meta["tokens"] == 30


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((10,), "at least two checkpoints"),
        ((10, 10), "given twice"),
        ((10, 99), "available steps: 30, 20, 10"),
        ((10, 20, "--weights", "1"), "1 numbers for 2"),
        ((10, 20, "--weights", "1,x"), "use numbers"),
        ((10, 20, "--weights", "1,-1"), "not negative"),
        ((10, 20, "--weights", "0,0"), "not all 0"),
        ((10, 20, "--weights", "1,nan"), "must be finite"),
        ((10, 20, "--ema", "1"), "less than 1"),
        ((10, 20, "--ema", "0.5", "--weights", "1,1"), "exclude each other"),
    ],
)
def test_what_is_no_average_is_refused(root: Path, arguments: tuple[object, ...], why: str) -> None:
    result = run(root, *arguments, "--output", root.parent / "out")
    assert result.exit_code == 2 and why in result.output and not (root.parent / "out").exists()


def test_checkpoints_of_other_models_are_refused_with_every_difference(root: Path) -> None:
    other = state(40) | {"model/wide": torch.zeros(5, 4), "model/more": torch.zeros(1)}
    del other["model/count"]
    save(LocalStore(root), whole(other), {"config": {"model": {"dim": 13}}}, 40, SingleProcessWorld())
    result = run(root, 10, 40, "--output", root.parent / "out")
    assert result.exit_code == 2
    for part in ("model/wide: float64 [5, 3]", "float32 [5, 4]", "model/more: only in", "model/count: only in", "[model] of the"):
        assert part in result.output
    assert not (root.parent / "out").exists()


def test_a_place_that_is_taken_stays_as_it_is(root: Path) -> None:
    out = root.parent / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    assert "not an empty directory" in run(root, 10, 20, "--output", out).output
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_fault_5_a_damaged_checkpoint_is_not_averaged(root: Path) -> None:
    file = root / "step-00000020/rank-00000.bin"
    file.write_bytes(b"\7" + file.read_bytes()[1:])
    result = run(root, 10, 20, "--output", root.parent / "out")
    assert result.exit_code == 2 and "checksum mismatch" in result.output and not (root.parent / "out").exists()


def test_a_checkpoint_without_weights_has_no_average(tmp_path: Path) -> None:
    for step in (1, 2):
        save(LocalStore(tmp_path / "c"), whole({"other/w": torch.ones(1)}), {}, step, SingleProcessWorld())
    assert "no tensor's name begins with model/" in run(tmp_path / "c", 1, 2, "--output", tmp_path / "o").output
    with pytest.raises(CheckpointError):
        of_ema(2, -0.1)
