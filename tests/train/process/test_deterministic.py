"""`train.deterministic`: torch's kernels that sum in one order, and nothing in a step that has none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import deterministic as torch_mode
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.errors import PlanError
from forge_parallel.accelerator import WORKSPACE, deterministic
from forge_train.run.loop import fit
from harness.pool import World
from train.runs import TINY, prepared, train

EXPERTS = "\n[model.moe]\nexperts = 4\ntop_k = 2\nffn_dim = 16\n\n[model.mtp]\ndepth = 1\n"
WITHOUT = """
avg_pool3d_backward adaptive_avg_pool2d_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward
fractional_max_pool2d_backward fractional_max_pool3d_backward max_unpool2d max_unpool3d upsample_linear1d_backward
upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward reflection_pad1d_backward
reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward
replication_pad3d_backward nll_loss2d_forward nll_loss2d_backward _ctc_loss_backward _embedding_bag put histc bincount kthvalue
median grid_sampler_2d_backward grid_sampler_3d_backward scatter_reduce resize_
"""
"""Operators that raise an error on CUDA: the list in the documentation of `torch.use_deterministic_algorithms`, as overloads are
called; `cumsum` does so for floating numbers, which is looked at by itself."""


class Seen(TorchDispatchMode):
    """Names of operators; cumulative sums of floating numbers are `cumsum of floats`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        self.names.add("cumsum of floats" if name == "cumsum" and args[0].is_floating_point() else name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    written = tmp_path / "tiny.toml"
    written.write_text(TINY + EXPERTS)
    return written


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """No test leaves the process in another mode."""
    yield
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch_mode.fill_uninitialized_memory


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_on_cpus_has_the_bits_that_it_has_without(world: World, recipe: Path, tmp_path: Path, size: int) -> None:
    found = [
        world.run(train, size, recipe, [f"--train.deterministic={on}", f"--job.dir={tmp_path / on}"]) for on in ("true", "false")
    ]
    assert [rank["weights"] for rank in found[0]] == [rank["weights"] for rank in found[1]]


def test_a_step_calls_no_operator_without_such_a_kernel(recipe: Path, tmp_path: Path) -> None:
    run, _ = prepared(
        recipe,
        [
            f"--job.dir={tmp_path / 'run'}",
        ],
    )
    with Seen() as seen:
        fit(run)
    assert {"mm", "embedding_dense_backward", "cumsum"} <= seen.names
    assert seen.names.isdisjoint({name.rstrip("_") for name in WITHOUT.split()} | {"cumsum of floats"})


def test_inside_a_run_the_mode_is_on_and_an_operator_without_a_kernel_ends_it_by_name(recipe: Path, tmp_path: Path) -> None:
    run, recorder = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.deterministic=true"])

    def puts(*_: Any) -> None:
        assert torch.are_deterministic_algorithms_enabled()
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))

    recorder.before_step = puts  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="put_"):
        fit(run)


def test_another_workspace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.raises(PlanError, match=":0:0"), deterministic(True):
        raise AssertionError
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv(WORKSPACE)
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
