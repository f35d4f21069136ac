"""Bytes that a rank reads from a Hugging Face folder when a run starts: those of its shards."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_models.components.transformers import TransformersConfig
from forge_models.hf.causal_lm_weights import Conversion
from harness.pool import World
from train.runs import prepared
from train.whole_runs.test_lora_of_classes import folder_of
from train.whole_runs.test_lora_run import RECIPE

MOST = 1.1
"""Bytes read over bytes kept."""
CLASS, DECODER = 'name = "transformers"\nfolder = "{folder}"', 'from_hf = "{folder}"'
TENSOR = ["--transforms.tensor.sequence_parallel=false"]


class Slices:
    """A lazy tensor of a file, whose parts are counted when they are read."""

    def __init__(self, lazy: Any, counted: list[int]) -> None:
        self.lazy, self.counted = lazy, counted

    def __getitem__(self, box: Any) -> torch.Tensor:
        found = self.lazy[box]
        self.counted.append(found.numel() * found.element_size())
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lazy, name)


class Counting:
    """An open file of safetensors that counts the bytes of the tensors that are asked of it."""

    def __init__(self, file: Any, counted: list[int]) -> None:
        self.file, self.counted = file, counted

    def get_tensor(self, name: str) -> torch.Tensor:
        found = self.file.get_tensor(name)
        self.counted.append(found.numel() * found.element_size())
        return found

    def get_slice(self, name: str) -> Slices:
        return Slices(self.file.get_slice(name), self.counted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "Counting":
        self.file.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.file.__exit__(*raised)


def started(recipe: Path, overrides: list[str]) -> tuple[int, int]:
    """Returns the bytes that this rank reads until its first step, and those that it keeps, in the dtype of the files."""
    import safetensors

    counted: list[int] = []
    others: list[str] = []
    original = safetensors.safe_open
    watching = [True]

    def hook(event: str, args: Any) -> None:
        if watching[0] and event == "open" and str(args[0]).endswith(".safetensors"):
            others.append(str(args[0]))

    sys.addaudithook(hook)
    safetensors.safe_open = lambda *args, **keys: Counting(original(*args, **keys), counted)  # type: ignore[assignment, misc]
    try:
        run, _ = prepared(recipe, overrides)
    finally:
        safetensors.safe_open, watching[0] = original, False  # type: ignore[misc]
    assert not others, "files are read with safe_open only, which is counted"
    kept = sum(4 * run.model.piece(name, tensor).local.numel() for name, tensor in run.model.tensors())
    return sum(counted), kept


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: folder_of(kind, tmp_path_factory.mktemp("base") / kind) for kind in ("llama", "mixtral")}


CASES = {
    "a class, dp_shard": (CLASS, "llama", ["--parallel.dp_shard=2"]),
    "a class, tp": (CLASS, "llama", ["--parallel.tp=2", *TENSOR]),
    "a decoder, dp_shard": (DECODER, "llama", ["--parallel.dp_shard=2"]),
    "a decoder, tp": (DECODER, "llama", ["--parallel.tp=2"]),
    "a class with experts, ep": (CLASS, "mixtral", ["--parallel.ep=2"]),
    "a decoder with experts, ep": (DECODER, "mixtral", ["--parallel.ep=2"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_reads_what_it_keeps(world: World, folders: dict[str, Path], tmp_path: Path, case: str) -> None:
    keys, kind, layout = CASES[case]
    recipe = tmp_path / "recipe.toml"
    text = RECIPE.replace('from_hf = "{base}"', keys.format(folder=folders[kind])).replace(
        "[model.lora]\nrank = 4\nalpha = 12\n", ""
    )
    recipe.write_text(text)
    whole, everything = started(recipe, [f"--job.dir={tmp_path / 'one'}"])
    assert whole == everything, "one process reads each tensor once"
    for read, kept in world.run(started, 2, recipe, [f"--job.dir={tmp_path / 'run'}", *layout]):
        assert kept < everything, "a rank keeps a part"
        assert kept <= read <= MOST * kept, (read, kept)


def test_boxes_of_stacks_are_those_of_the_whole_tensors(folders: dict[str, Path]) -> None:
    """Each box of each tensor of a class with experts, whose stacks are made of tensors of the folder."""
    folder = folders["mixtral"]
    model = TransformersConfig(folder=str(folder), config=(folder / "config.json").read_text())
    weights = model.reopened(folder)
    stacks = [name for name, entry in weights.tensors.items() if len(entry.shape) == 3]
    assert len(stacks) == 4
    whole = weights.read(list(weights.tensors))
    for name, tensor in whole.items():
        for first in range(0, len(tensor), 3):
            extent = (min(2, len(tensor) - first), *(size - 1 for size in tensor.shape[1:]))
            offset = (first, *(1 for _ in tensor.shape[1:]))
            expected = tensor[tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))]
            assert torch.equal(weights.box(name, offset, extent), expected), name


def test_a_conversion_that_mixes_entries_is_no_stack() -> None:
    class Mixing:
        def __init__(self, turned: bool) -> None:
            self.turned, self.given = turned, []

        def add_tensor(self, _name: str, _stored: str, _pattern: str, tensor: torch.Tensor) -> None:
            self.given.append(tensor)

        def convert(self, name: str, **_: Any) -> dict[str, torch.Tensor]:
            return {name: torch.stack(self.given[::-1] if self.turned else self.given)}

    sources = tuple((f"e.{index}", "e.*") for index in range(3))
    module: Any = type("Module", (), {"config": None})()
    assert Conversion(sources, Mixing(False), "e").is_stack(3, module)
    assert not Conversion(sources, Mixing(True), "e").is_stack(3, module)
    assert not Conversion(sources, Mixing(False), "e").is_stack(2, module)
    assert not Conversion(sources, None, "e").is_stack(3, module)
