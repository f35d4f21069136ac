"""The hook `sample`: its texts are those of the model that training has reached, sharded or not."""

import json
from pathlib import Path

import pytest

from forge_ckpt.checkpoint.locate import locate
from forge_core.registry import Registry
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_models.generation import Sampling, generate
from forge_train.directory import SAMPLES
from forge_train.formats.forge import ForgeWeights
from forge_train.inference.stored import load_model
from harness.pool import World
from train.runs import TINY, train

PROMPTS = ["a", "longer"]
HOOK = """
temperature = 0.9
top_k = 50
top_p = 0.9
min_p = 0.8
repetition_penalty = 1.1
"""
SAMPLING = Sampling(repetition_penalty=1.1, temperature=0.9, top_k=50, top_p=0.9, min_p=0.8, seed=3)


@pytest.mark.parametrize("size", [1, 2])
def test_samples_are_what_the_weights_generate(world: World, tmp_path: Path, size: int) -> None:
    recipe = tmp_path / "tiny.toml"
    hook = f'\n[[hooks]]\nname = "sample"\nprompts = {json.dumps(PROMPTS)}\nmax_tokens = 24{HOOK}'
    recipe.write_text(TINY.replace("vocab_size = 61", "vocab_size = 257") + '\n[data.tokenizer]\nname = "bytes"\n' + hook)
    directory = tmp_path / "run"
    world.run(train, size, recipe, [f"--job.dir={directory}", "--train.max_steps=3"])
    coder = ByteTokenizer()
    model = load_model(ForgeWeights(locate(directory), Registry()))
    rows = generate(
        model,  # type: ignore[arg-type]
        [coder.encode(prompt).tolist() for prompt in PROMPTS],
        SAMPLING,
        max_tokens=24,
        eos=coder.eos,
    )
    kept = json.loads((directory / SAMPLES).read_text())
    assert [entry["text"] for entry in kept] == [coder.decode(row) for row in rows]
    assert [entry["prompt"] for entry in kept] == PROMPTS
    assert all(entry["step"] == 3 for entry in kept)
