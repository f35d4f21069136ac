"""Every registered optimizer, hook, source, schedule and objective, cut and killed on the way, ends as if it had never stopped.

What a part keeps of a run is found by what comes after it: the last checkpoint has to be that of an uninterrupted run byte by
byte, with its tensors, its data position and the states of hooks, and so has every line of the metrics after the cut, but for
clocks. The registry says which parts there are, and each gives its examples.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from forge_ckpt.checkpoint.locate import locate
from forge_core.component import Component, fields_of
from forge_core.errors import ConfigError
from forge_core.registry import Entry, Registry
from forge_train.directory import CHECKPOINTS
from forge_train.run.loop import fit
from forge_train.trackers import METRICS, read_metrics
from harness.pool import World
from train.runs import prepared

REGISTRY = Registry()
GROUPS = ("forge.optimizers", "forge.hooks", "forge.sources", "forge.schedules", "forge.objectives")
PARTS = [entry for group in GROUPS for entry in REGISTRY.of(group) if entry.distribution.startswith("forge-")]
STEPS, CUT, KILLED = 12, 4, 6
"""The first start ends with a save at the cut; the second saves at step 5 and is lost after step 6; the third goes to the end."""

RECIPE = """
[job]
name = "resumed"
seed = 3

[model]
name = "decoder"
dim = 16
layers = 2
heads = 2
ffn_dim = 24
vocab_size = 300
max_length = 128

[model.moe]
experts = 4
first_dense = 1
router = {{ name = "sigmoid_topk", bias_rate = 0.01 }}

[data]
sequence_length = 16
shuffle_buffer = 8
readers = 2

[data.tokenizer]
name = "bytes"

[[data.sources]]
{sources}

[[data.sources]]
name = "random"
label = "rest"
vocab_size = 257
tokens = 4000
document = 23
weight = 0.5

[[data.phases]]
start = 2
weights = {{ rest = 2.0 }}
ramp = 4
lr_scale = 0.5

[[data.phases]]
start = 7
sequence_length = 8
global_batch = 8

[data.evaluation.held_out]
name = "random"
vocab_size = 257
tokens = 80
seed = 1

[train]
max_steps = 12
threads = 1
global_batch = 4
micro_batch = 2
collect_every = "none"

[precision]
compute = "fp32"

[optimizer]
{optimizers}

[schedule]
{schedules}

[objective]
{objectives}

[checkpoint]
every = 5

[[hooks]]
name = "log"
every = 1

[[hooks]]
name = "evaluate"
every = 2

[[hooks]]
{hooks}

[[hooks]]
name = "save"
"""
SEEING = (
    (
        """name = "decoder"
""",
        """name = "vlm"
fusion = {{ name = "mot" }}
adapter = {{ name = "perceiver", latents = 2, heads = 2 }}
encoder = {{ name = "vit", size = 8, patch = 4, dim = 8, layers = 1, heads = 2 }}
""",
    ),
    ("vocab_size = 300", "vocab_size = 301"),
    (
        "[data]",
        '''[data]
packing = "best_fit"''',
    ),
    ("sequence_length = 8", ""),
    (
        "[data.evaluation.held_out]",
        """[data.evaluation.asked]
name = "digits"
split = "held_out"
held_out = 0.01

[data.evaluation.held_out]""",
    ),
)
"""What makes the recipe one with images, for parts that need them: two placeholders of id 300 for each."""
USUAL = {
    "sources": 'name = "random"\nvocab_size = 257\ntokens = 3000\ndocument = 11',
    "optimizers": 'name = "adamw"',
    "schedules": 'name = "constant"\nwarmup = 6',
    "objectives": 'name = "cross_entropy"',
    "hooks": 'name = "norms"\nevery = 2',
}
CLOCKS = re.compile(
    r"time(/.*)?|pauses/.*|.*seconds.*|tokens_per_second|model_tflops|mfu|mfu_attended|peak_memory|straggler.*|machine/.*"
)
"""Numbers of the metrics that say how long something took, or what else the process has held."""


def table(name: str, part: Component) -> str:
    """A part as keys of a recipe: those that are not as by default."""
    lines = [f"name = {json.dumps(name)}"]
    for info in fields_of(type(part)):
        value = getattr(part, info.name)
        if info.required or value != info.default:
            lines.append(f"{info.name} = {json.dumps(value)}")
    return "\n".join(lines)


def variants(part: Component) -> Iterator[Component]:
    """As it is, but it acts more than once before the cut and after it, warms up within the run, and does not end it. What is
    better when it is less is tried as better when it is more, too: one of them has its best result before the cut."""
    most = {"every": 2, "warmup": 3}
    part = replace(part, **{name: value for name, value in most.items() if getattr(part, name, 0) > value})
    part = replace(part, patience=STEPS) if hasattr(part, "patience") else part  # type: ignore[call-arg]
    yield part
    if getattr(part, "mode", "") == "min":
        yield replace(part, mode="max")  # type: ignore[call-arg]


def recipes(entry: Entry, folder: Path) -> Iterator[Path]:
    """A recipe for each example of a part."""
    folder.mkdir()
    kind = entry.group.removeprefix("forge.")
    parts = chain.from_iterable(variants(part) for part in REGISTRY.load_entry(entry).examples(folder))
    for number, part in enumerate(parts):
        path = folder / f"recipe-{number}.toml"
        recipe = RECIPE
        if getattr(part, "keeps_documents", False) or entry.name == "answers":
            for before, after in SEEING:
                assert before in recipe
                recipe = recipe.replace(before, after, 1)
        path.write_text(recipe.format(**USUAL | {kind: table(entry.name, part)}))
        yield path


class Killed(BaseException):
    """What nothing catches, as what kills."""


def begin(recipe: Path, directory: Path, *options: str, kill: int = 0) -> None:
    """One start of a run in this process; with `kill` it is lost after that step was computed, before it is taken note of."""
    run, _ = prepared(recipe, [f"--job.dir={directory}", *options])
    update = run.update

    def until_killed(result: Any) -> None:
        update(result)
        if run.state.step + 1 == kill:
            raise Killed

    run.update = until_killed  # type: ignore[method-assign]
    try:
        fit(run)
    except Killed:
        pass
    finally:
        for tracker in run.trackers:
            tracker.close()


def whole_and_cut(recipe: Path, folder: Path, *options: str) -> None:
    """Leaves two runs in `folder`; on every rank."""
    begin(recipe, folder / "whole", *options)
    begin(recipe, folder / "cut", f"--train.stop_at={CUT}", *options)
    begin(recipe, folder / "cut", *options, kill=KILLED)
    begin(recipe, folder / "cut", *options)


def last(directory: Path) -> tuple[dict[str, bytes], Mapping[str, Any]]:
    """Tensor files of the last checkpoint, and what it says of the run but for clocks, the run's directory and its saves."""
    path = directory / CHECKPOINTS / locate(directory).name
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    meta = {key: value for key, value in manifest["meta"].items() if key not in ("seconds", "config")}
    del meta["health"]["saves"]  # one more where the run was cut
    files = {file.name: file.read_bytes() for file in path.iterdir() if file.suffix != ".json"}
    return files, {"step": manifest["step"], **meta}


def numbers(directory: Path) -> list[dict[str, Any]]:
    """Lines of the metrics after the cut; what two hooks say alike once, as `log` always does at the first step of a start."""
    lines = [line for line in read_metrics(directory / METRICS) if line["step"] > CUT]
    said = [{name: value for name, value in line.items() if not CLOCKS.fullmatch(name)} for line in lines]
    return [line for at, line in enumerate(said) if line not in said[:at]]


def compare(folder: Path, example: str) -> None:
    whole, cut = last(folder / "whole"), last(folder / "cut")
    assert whole[1]["step"] == STEPS and whole[0].keys() == cut[0].keys() and len(whole[0]) > 0
    assert cut[1] == whole[1], example
    assert [name for name, content in whole[0].items() if cut[0][name] != content] == [], example
    expected = numbers(folder / "whole")
    assert {line["step"] for line in expected} == set(range(CUT + 1, STEPS + 1))
    assert numbers(folder / "cut") == expected, example


def named(entry: Entry) -> Any:
    """A case with the part's name. Slow ones: the library behind `tasks` takes seconds to import, schedules and objectives keep
    nothing, and conformance checks the position in a source."""
    marks = [pytest.mark.slow] if entry.name == "tasks" or entry.group in GROUPS[2:] else []
    return pytest.param(entry, id=f"{entry.group.removeprefix('forge.')}-{entry.name}", marks=marks)


@pytest.mark.parametrize("entry", [named(entry) for entry in PARTS])
def test_fault_17_a_run_that_is_cut_and_killed_ends_as_one_that_is_not(tmp_path: Path, entry: Entry) -> None:
    """Two micro-batches a step; a phase and a ramp cross the cut, another phase begins after it."""
    for recipe in recipes(entry, tmp_path / "examples"):
        whole_and_cut(recipe, folder := tmp_path / recipe.stem)
        compare(folder, recipe.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("entry", [named(entry) for entry in PARTS if entry.group == "forge.optimizers"])
def test_fault_17_what_is_rounded_at_random_is_rounded_alike_after_a_resume(tmp_path: Path, entry: Entry) -> None:
    """With state in bf16; an optimizer that has none refuses it."""
    recipe = next(recipes(entry, tmp_path / "examples"))
    try:
        whole_and_cut(recipe, tmp_path, "--precision.compute=bf16", "--precision.state=bf16")
    except ConfigError as refusal:
        assert [fault.key for fault in refusal.faults] == ["precision.state"]
    else:
        compare(tmp_path, recipe.read_text())


DRAWS = '''
from dataclasses import dataclass

import torch

from forge_core.component import Component
from forge_core.protocols.run import Hook


class Drawing(Hook):
    def before_update(self, run, result):
        self.drawn = float(torch.rand(()))

    def after_step(self, run, result):
        run.log({"drawn": self.drawn})


@dataclass(frozen=True, kw_only=True)
class Draws(Component):
    """Draws from the generator of torch, as dropout does."""

    def build(self):
        return Drawing()
'''


def test_fault_17_what_a_part_of_ones_own_draws_in_a_step_it_draws_after_a_resume(tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(**USUAL | {"hooks": 'name = "./draws.py:Draws"'}))
    whole_and_cut(recipe, tmp_path)
    compare(tmp_path, recipe.read_text())
    assert len({line["drawn"] for line in numbers(tmp_path / "whole") if "drawn" in line}) == STEPS - CUT


@pytest.mark.slow
@pytest.mark.parametrize("entry", [named(entry) for entry in PARTS if entry.group in GROUPS[:2]])
def test_fault_17_so_does_one_of_two_ranks_that_shard(world: World, tmp_path: Path, entry: Entry) -> None:
    for recipe in recipes(entry, tmp_path / "examples"):
        folder = tmp_path / recipe.stem
        world.run(whole_and_cut, 2, recipe, folder, "--train.micro_batch=1", timeout=200)
        compare(folder, recipe.read_text())
