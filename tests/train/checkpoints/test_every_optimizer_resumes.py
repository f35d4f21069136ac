"""Every optimizer of ours goes on, in new processes, as if it had never stopped: the same bits on the same layout, with experts.

`test_optimizer_resume.py` has the fast ones.
"""

from pathlib import Path

import pytest
import torch

from forge_core.registry import Registry
from harness.pool import World
from train.checkpoints.test_expert_checkpoints import LAYOUTS, RECIPE, together, trained

OURS = sorted(entry.name for entry in Registry().of("forge.optimizers") if entry.distribution.startswith("forge-"))


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_fault_17_it_resumes_bit_by_bit(world: World, tmp_path: Path, name: str) -> None:
    recipe = tmp_path / "resumed.toml"
    recipe.write_text(RECIPE.replace("[optimizer]\n", f'[optimizer]\nname = "{name}"\n'))
    after = []
    for directory, legs in (("whole", (6,)), ("resumed", (3, 6))):
        for steps in legs:
            arguments = (recipe, [f"--job.dir={tmp_path / directory}", "--schedule.name=constant", *LAYOUTS["ep2"]], steps)
            ranks = world.run(trained, 2, *arguments, timeout=200, fresh=True)
        after.append(together(ranks, "after"))
    assert after[0].keys() == after[1].keys() and any("/" in key for key in after[0])
    for key, tensor in after[0].items():
        assert torch.equal(tensor, after[1][key]), key
