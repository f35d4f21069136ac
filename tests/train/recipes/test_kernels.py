"""Kernels that a machine does not have are refused before a run touches its directory."""

from pathlib import Path

import pytest

from forge_core.errors import ConfigError, ForgeError
from forge_core.registry import Registry
from forge_train.recipe import checks
from forge_train.recipe.load import load_recipe
from train.runs import TINY, prepared


@pytest.mark.parametrize("core", ["flex", "varlen"])
def test_trials_d13_a_kernel_for_gpus_is_refused_on_a_cpu(core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    given = [f"--job.dir={tmp_path / 'run'}", f"--model.attention.core={core}"]
    recipe, said = tmp_path / "tiny.toml", f"model.attention.core: '{core}' needs a CUDA device"
    monkeypatch.setattr(checks, "has_accelerator", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (warning,) = [each for each in load_recipe(recipe, given, 1, Registry()).warnings if "attention.core" in each]
    assert said in warning and "this machine has no visible one" in warning, "a check may be for a run elsewhere"
    with pytest.raises(ConfigError, match=said):
        load_recipe(recipe, given, 1, Registry(), here=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=f"{said}, and CUDA_VISIBLE_DEVICES hides all of them"):
        load_recipe(recipe, given, 1, Registry())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(checks, "has_accelerator", lambda: True)  # shown, and torch cannot use it
    assert not any("attention.core" in each for each in load_recipe(recipe, given, 1, Registry()).warnings)
    with pytest.raises(ForgeError, match=f"model.attention.core = '{core}' needs a CUDA device, and this is cpu"):
        prepared(recipe, given)
    assert not (tmp_path / "run").exists()
    assert not load_recipe(recipe, given[:1], 1, Registry(), here=True).warnings
