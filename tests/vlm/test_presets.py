"""Presets of vision-language models: parameters by closed form, worlds that `check` takes, and a demo that sees."""

import json
import re
from pathlib import Path

import pytest
import torch

import forge_vlm.presets
from forge_core.registry import Registry
from forge_train.recipe.load import load_recipe
from harness import commands

FOLDER = Path(forge_vlm.presets.__file__).parent
EVERY = sorted(path.stem for path in FOLDER.glob("*.toml"))
FUSIONS = {"joint": "joint_decoder", "cross": "cross_attention", "mot": "mot", "moma": "moma"}

DIM, LAYERS, FFN, VOCAB, KV = 4096, 32, 14336, 128512, 1024
ATTENTION, MLP, NORMS = 2 * DIM * DIM + 2 * DIM * KV, 3 * DIM * FFN, 2 * DIM
TABLES = 2 * VOCAB * DIM + DIM


def tower(dim: int = 1152, layers: int = 27, ffn: int = 4304, patch: int = 14, patches: int = 784) -> int:
    """Weights of a vision transformer: no bias of queries, keys and values."""
    block = 4 * dim * dim + dim + 2 * dim * ffn + ffn + dim + 4 * dim
    return 3 * patch * patch * dim + dim + patches * dim + layers * block + 2 * dim


SEEING = tower() + 4 * 1152 * DIM
"""The tower, and the projection of four features to one token."""
CLOSED = {
    "7b-joint": TABLES + LAYERS * (ATTENTION + MLP + NORMS) + SEEING,
    # a cross block has attention over images, norms of queries and keys, a feed-forward part, two norms and two gates
    "7b-cross": TABLES + LAYERS * (ATTENTION + MLP + NORMS) + LAYERS // 4 * (ATTENTION + 2 * 128 + MLP + NORMS + 2) + SEEING,
    "7b-mot": TABLES + LAYERS * 2 * (ATTENTION + MLP + NORMS) + SEEING,
    # four experts and their router for each modality
    "7b-moma": TABLES + LAYERS * (ATTENTION + 2 * (4 * MLP + 4 * DIM) + NORMS) + SEEING,
    # 64 sines and cosines of the time of a frame
    "7b-video": TABLES + LAYERS * (ATTENTION + MLP + NORMS) + SEEING + 64 * DIM,
}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


def stated(name: str, what: str) -> list[int]:
    line = re.search(rf"^# {what}: (.*)$", (FOLDER / f"{name}.toml").read_text(), re.MULTILINE)
    assert line, f"{name} does not state its {what}"
    return [int(number.replace(",", "")) for number in line[1].split(", ")]


def test_every_fusion_has_presets() -> None:
    assert set(EVERY) == {f"{size}-{name}" for size in ("debug", "7b") for name in FUSIONS} | {"vlm-demo", "7b-video"}
    assert {entry.name for entry in Registry().of("forge.presets") if entry.distribution == "forge-vlm"} == set(EVERY)


@pytest.mark.parametrize("name", CLOSED)
def test_parameters_and_worlds_are_those_stated(name: str, registry: Registry) -> None:
    with torch.device("meta"):
        model = load_recipe(name, registry=registry).job.model.build()
    assert sum(p.numel() for p in model.parameters()) == CLOSED[name] == stated(name, "Parameters")[0]
    worlds = stated(name, "GPUs")
    for world in worlds:
        layout = load_recipe(name, world=world, registry=registry).layout
        assert layout is not None and layout.dp_shard == world
    assert 16 * CLOSED[name] / worlds[0] < 50e9, "weights, gradients and states of the smallest world leave room on 80 GB"


@pytest.mark.parametrize("size", ["debug", "7b"])
@pytest.mark.parametrize("name", FUSIONS)
def test_presets_choose_their_fusion(size: str, name: str, registry: Registry) -> None:
    fusion = load_recipe(f"{size}-{name}", registry=registry).job.model.fusion
    assert type(fusion) is registry.load("forge.fusions", FUSIONS[name])


def test_the_preset_for_videos_asks_about_clips_that_fit_into_a_row(registry: Registry) -> None:
    job = load_recipe("7b-video", registry=registry).job
    assert [type(source).__name__ for source in job.data.sources] == ["VideoQuestions"] * 2
    assert all(source.select.name == "diverse" for source in job.data.sources)
    assert max(source.frames for source in job.data.sources) * job.model.per_image < job.data.sequence_length / 2


DEBUG = ["debug-joint", *(pytest.param(f"debug-{name}", marks=pytest.mark.slow) for name in ("cross", "mot", "moma"))]
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def run(folder: Path, *arguments: str) -> str:
    done = commands.run("-m", "forge_train", "run", *arguments, f"--job.dir={folder}", cwd=folder, timeout=900)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize("name", DEBUG)
def test_debug_presets_run_and_answer(name: str, tmp_path: Path) -> None:
    """Twenty steps, an evaluation, and answers of which the report shows pictures; a second start has nothing left to do."""
    said = run(tmp_path, name)
    assert "held_out/exact_match" in said and "finished after step 20" in said
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert len(answers) == 8 and all(len(answer["pictures"]) == 1 and answer["answer"] for answer in answers)
    assert {answer["answer"] for answer in answers} <= {*NAMES}
    page = (tmp_path / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == 8 and "Answers to held-out documents" in page
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (share,) = [line["held_out/exact_match"] for line in lines if "held_out/exact_match" in line]
    assert share == sum(answer["right"] for answer in answers) / 8


@pytest.mark.slow
@pytest.mark.parametrize("fusion", FUSIONS.values())
def test_the_demo_describes_digits_that_it_never_saw(fusion: str, tmp_path: Path) -> None:
    run(tmp_path, "vlm-demo", f"--model.fusion.name={fusion}")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (share,) = [line["held_out/exact_match"] for line in lines if "held_out/exact_match" in line]
    assert share > 0.9
