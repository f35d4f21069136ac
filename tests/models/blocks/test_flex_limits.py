"""Calls of flex attention that no GPU has shown to be right: which are refused, which get a mask, and which stay."""

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention

from forge_core.errors import ConfigError, ForgeError
from forge_core.protocols.model import PositionedTokens
from forge_core.registry import Registry
from forge_models import accelerator
from forge_models.blocks import attention as module
from forge_models.blocks.attention import LocalAttention
from forge_parallel.transforms import compilation
from forge_train.recipe import checks
from forge_train.recipe.load import load_recipe
from forge_train.run import start
from train.runs import TINY

Mask, Blocks = torch.Tensor, flex_attention.BlockMask


@pytest.fixture
def gpu(monkeypatch):
    """The choice of a CUDA device; masks are made on this machine."""
    monkeypatch.setattr(accelerator, "has_flex", lambda device, wanted=False: True)
    monkeypatch.setattr(module, "_compiled", lambda name: getattr(flex_attention, name))
    with torch.compiler.set_stance("force_eager"):
        yield


def prepared(kind, length, *, compiled=False, documents=False, capped=False, sinks=False, window=None):
    core = LocalAttention(kind, capped=capped, sinks=sinks)
    core.in_compiled_block = compiled
    numbers = (torch.arange(length) // 9).int()[None] if documents else None
    return core.prepare(numbers, length, window, "cpu")


@pytest.mark.parametrize("given", [{"documents": True}, {"window": 7}, {"sinks": True}])
def test_a_compiled_block_has_flex_for_rows_of_a_block_or_more(gpu, given):
    """Documents may be short: only rows are cut into blocks."""
    for length in (9, 127):
        assert isinstance(prepared("auto", length, compiled=True, **given), Mask | None)
        with pytest.raises(ValueError, match=rf"core = 'flex' is not proven in compiled blocks for rows of {length} tokens"):
            prepared("flex", length, compiled=True, **given)
        for kind in ("auto", "flex"):
            assert isinstance(prepared(kind, length, **given), Blocks), "by itself the kernel is exact"
    for length in (128, 130):
        assert isinstance(prepared("auto", length, compiled=True, **given), Blocks)
        assert isinstance(prepared("flex", length, compiled=True, **given), Blocks)


@pytest.mark.parametrize("documents", [False, True])
def test_a_soft_cap_has_gradients_for_whole_blocks_only(gpu, documents):
    given = {"capped": True, "documents": documents}
    for length in (129, 255, 200):
        for kind in ("auto", "flex"):
            with pytest.raises(ValueError, match=rf"model.attention.soft_cap for rows of {length} tokens.* multiple of 128"):
                prepared(kind, length, **given)
    assert isinstance(prepared("auto", 100, **given), Mask | None), "short rows have a small mask"
    with pytest.raises(ValueError, match=r"'flex' is not proven with model\.attention\.soft_cap for rows of 100"):
        prepared("flex", 100, **given)
    for kind, length in (("auto", 128), ("auto", 256), ("flex", 384)):
        assert isinstance(prepared(kind, length, **given), Blocks)
    with torch.no_grad():
        assert isinstance(prepared("auto", 200, **given), Blocks), "the forward is exact"
    assert isinstance(prepared("sdpa", 200, **given), Mask | None)


def test_rows_that_ranks_share_have_the_length_of_a_rank(gpu):
    core = LocalAttention()
    row = [PositionedTokens(torch.arange(length), None) for length in (64, 256)]
    assert isinstance(core.prepare_placed(row[0], row[1], None), Blocks)
    core.in_compiled_block = True
    with pytest.raises(ValueError, match=r"rows of 64 tokens.*each rank of parallel\.cp"):
        core.prepare_placed(row[0], row[1], None)
    assert isinstance(core.prepare_placed(row[0], row[0], None), Mask)
    capped = LocalAttention(capped=True)
    with pytest.raises(ValueError, match="rows of 64 tokens: gradients"):
        capped.prepare_placed(row[0], row[1], None)


def test_a_model_that_is_compiled_whole_counts_as_compiled(gpu, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="in compiled blocks"):
        prepared("flex", 64, window=7)


def test_a_mask_on_a_cpu_has_no_limits():
    assert isinstance(prepared("auto", 9, compiled=True, documents=True), Mask)
    assert isinstance(prepared("auto", 200, capped=True, documents=True), Mask)


def test_the_compile_transform_tells_the_cores_also_inside_others():
    class Outer:
        def __init__(self, inner):
            self.inner = inner

    block, other = nn.Module(), nn.Module()
    block.first, block.second = nn.Module(), nn.Module()
    block.first.core, block.second.core, other.core = LocalAttention(), Outer(LocalAttention()), LocalAttention()
    compilation._tell_cores(block)
    assert block.first.core.in_compiled_block and block.second.core.inner.in_compiled_block
    assert not other.core.in_compiled_block


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "tiny.toml").write_text(TINY)

    def load(*given, gpu=True):
        monkeypatch.setattr(checks, "has_accelerator", lambda: gpu)
        return load_recipe(tmp_path / "tiny.toml", [f"--job.dir={tmp_path / 'run'}", *given], 1, Registry())

    return load


def test_check_refuses_a_recipe_before_a_gpu_is_asked(recipe):
    with pytest.raises(ConfigError, match=r"model\.attention\.core: .*'flex' is not proven in compiled blocks"):
        recipe("--model.attention.core=flex", "--transforms.compile.mode=default", gpu=False)
    recipe("--model.attention.core=flex")
    capped = ("--model.attention.soft_cap=30.0", "--data.sequence_length=200", "--model.max_length=256")
    with pytest.raises(ConfigError, match=r"soft_cap for rows of 200 tokens"):
        recipe(*capped)
    recipe(*capped, "--model.attention.core=sdpa")
    found = recipe(*capped, gpu=False)  # a run on a CPU
    with pytest.raises(ForgeError, match=r"soft_cap for rows of 200 tokens.*set it to 'sdpa'"):
        start._check_kernels(found.job, torch.device("cuda", 0))
    start._check_kernels(found.job, torch.device("cpu"))
