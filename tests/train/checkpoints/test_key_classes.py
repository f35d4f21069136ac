"""W2: a resume knows what it resumes. Every key has a class; what changes the function is refused unless it is named."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_ckpt.checkpoint.verification import open_manifest
from forge_ckpt.store.local import LocalStore
from forge_core.component import KeyClass, class_of_keys, fields_of
from forge_core.config.changes import changes
from forge_core.config.fields import shape_of
from forge_core.config.tree import DEFAULT, Table, build, leaves
from forge_core.config.validation import walk
from forge_core.errors import CheckpointError, ConfigError
from forge_core.registry import GROUPS, Registry
from forge_core.trust import trust_file
from forge_train.recipe.load import load_recipe
from forge_train.recipe.schema import Job
from forge_train.run.loop import fit
from forge_train.run.resume import compare_recipes
from train.runs import TINY, prepared

OURS = {
    "forge-core",
    "forge-parallel",
    "forge-models",
    "forge-data",
    "forge-ckpt",
    "forge-vlm",
    "forge-interp",
    "forge-train",
    "forge-lab",
}
OUTSIDE = {"forge.converters"} | {name for name, group in GROUPS.items() if group.build is None}
"""Groups that no recipe chooses from."""

IDENTITY = {
    *("job.seed", "model", "optimizer", "objective", "data.documents", "data.tokenizer", "precision.state"),
    *("forge.models:decoder.dim", "forge.models:decoder.rope.theta", "forge.models:decoder.mlp", "forge.models:decoder.soft_cap"),
    *("forge.models:decoder.moe.losses.z", "forge.models:decoder.tied_embeddings", "forge.attentions:gqa.window"),
    *("forge.norms:rmsnorm.eps", "forge.objectives:cross_entropy.z_loss", "forge.tokenizers:bpe.vocab_size"),
}
"""Some that must be: written down here, not read from what the components say."""

NOT_IDENTITY = {
    *("job.name", "job.dir", "train.max_steps", "train.micro_batch", "train.threads", "schedule", "hooks", "trackers"),
    *("parallel.tp", "parallel.pipeline.split", "transforms", "precision.compute", "checkpoint.every", "checkpoint.allow"),
    *("data.workers", "data.phases", "data.evaluation", "forge.optimizers:adamw.lr", "forge.models:decoder.from_hf"),
    *("forge.attentions:gqa.core", "forge.sources:text.path", "forge.sources:store.weight", "forge.transforms:compile.mode"),
}


def keys(cls: type, prefix: str) -> Iterator[tuple[str, KeyClass | None]]:
    for info in fields_of(cls):
        yield f"{prefix}{info.name}", info.declared_class
        shape = shape_of(info.type)
        for below in (shape, shape.inner):
            if below is not None and below.kind == "section":
                yield from keys(below.type, f"{prefix}{info.name}.")


def ours() -> dict[str, KeyClass | None]:
    """Every key of every section and of every component of ours that a recipe can choose."""
    registry = Registry()
    found = dict(keys(Job, ""))
    for group in GROUPS.keys() - OUTSIDE:
        for entry in registry.of(group):
            if entry.distribution in OURS:
                found |= keys(registry.load_entry(entry), f"{group}:{entry.name}.")
    return found


def test_w2_every_key_of_ours_declares_its_class() -> None:
    found = ours()
    assert len(found) > 250
    assert not [key for key, declared in found.items() if declared is None]
    assert {key for key in IDENTITY if found[key] is not KeyClass.IDENTITY} == set()
    assert {key for key in NOT_IDENTITY if found[key] is KeyClass.IDENTITY} == set()


def test_w2_every_transform_of_ours_says_what_its_presence_means() -> None:
    registry = Registry()
    found = {entry.name: class_of_keys(registry.load_entry(entry)) for entry in registry.of("forge.transforms")}
    assert None not in found.values() and KeyClass.IDENTITY not in found.values()


PLUGIN = '''
from dataclasses import dataclass
from typing import Annotated, ClassVar

from forge_core.component import FREE, Component
from forge_core.protocols.run import Hook
from forge_train.schedules import Constant


@dataclass(frozen=True, kw_only=True)
class Mine(Component):
    """A hook of somebody else's."""

    strength: float = 1.0
    """Nothing says what this changes."""
    every: Annotated[int, FREE] = 10
    """Declared."""
    api_key: str = ""
    """A secret."""

    def build(self):
        return Hook()


@dataclass(frozen=True, kw_only=True)
class Longer(Constant):
    """Takes over the keys of ours, and adds one."""

    extra: int = 0
    """Not declared, whatever the base says of its own keys."""
'''


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a run of one step."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "mine.py").write_text(PLUGIN)
    (folder / "tiny.toml").write_text(
        TINY + '\n[[hooks]]\nname = "./mine.py:Mine"\napi_key = "sk-1"\n\n[transforms.recompute]\n\n[checkpoint.store]\n'
    )
    run, _ = prepared(folder / "tiny.toml", [f"--job.dir={folder / 'run'}", "--train.max_steps=2", "--schedule.warmup=0"])
    fit(run)
    return folder


def resumed(folder: Path, *overrides: str, change: Any = None) -> Any:
    """What the comparison says about the checkpoint of `folder`, its facts changed by `change`."""
    registry = Registry()
    resolved = load_recipe(
        folder / "tiny.toml",
        [f"--job.dir={folder / 'run'}", "--train.max_steps=2", "--schedule.warmup=0", *overrides],
        1,
        registry,
    )
    meta = json.loads(json.dumps(open_manifest(LocalStore(folder / "run" / "checkpoints"), "step-00000002")[0].meta))
    if change is not None:
        change(meta)
    return compare_recipes(meta, resolved, registry)


def test_nothing_changed_is_nothing_said(trained: Path) -> None:
    found = resumed(trained)
    assert (found.anchored, dict(found.refused), found.noted) == ((), {}, ())


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        ("--model.mlp.name=geglu", "model.mlp.name", "swiglu"),
        ("--model.rope.theta=10", "model.rope.theta", "was 10000.0, is 10"),
        ("--model.attention.window=2", "model.attention.window", 'was "none", is 2'),
        ("--model.soft_cap=30", "model.soft_cap", "is 30"),
        ("--objective.z_loss=0.1", "objective.z_loss", "was 0.0, is 0.1"),
        ("--precision.state=bf16 --precision.compute=bf16", "precision.state", 'was "fp32", is "bf16"'),
        ("--job.seed=7", "job.seed", "was 3, is 7"),
        ("--data.documents=ignore", "data.documents", 'was "mask", is "ignore"'),
        ("--data.tokenizer.name=sentencepiece --data.tokenizer.path=elsewhere.model", "data.tokenizer", "sentencepiece"),
        ("--hooks.1.strength=2.0", "hooks.1.strength", "was 1.0, is 2.0"),
    ],
)
def test_w2_what_changes_the_function_is_refused_unless_named(trained: Path, change: str, key: str, said: str) -> None:
    changes = change.split()
    found = resumed(trained, *changes)
    assert list(found.refused) == [key] and said in found.refused[key]
    allowed = resumed(trained, *changes, f"--checkpoint.allow={key}")
    assert not allowed.refused and any(said in line for line in allowed.noted)
    listed = resumed(trained, *changes, f'--checkpoint.allow=["train.max_steps", "{key}"]')
    assert listed == allowed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("--optimizer.lr=0.5", "optimizer.lr was 0.01, is 0.5"),
        ("--schedule.name=constant", "schedule.name was {name = "),
        ("--train.micro_batch=4", "train.micro_batch was 2, is 4"),
        ("--precision.compute=bf16", 'precision.compute was "fp32", is "bf16"'),
        ("--transforms.recompute=none", "transforms.recompute was {name = "),
        ("--transforms.compile.mode=default", "transforms.compile was nothing, is {name"),
        ("--transforms.recompute.every=2", "transforms.recompute.every was 1, is 2"),
        ("--hooks=[]", 'hooks was [{name = "save"}'),
        ("--hooks.1.every=3", "hooks.1.every was 10, is 3"),
        ("--data.sources.0.label=other", 'data.sources.0.label was "none", is "other"'),
        ("--model.init_std=0.1", "model.init_std was 0.02, is 0.1"),
    ],
)
def test_w2_what_may_change_is_listed_with_both_values(trained: Path, change: str, said: str) -> None:
    found = resumed(trained, change)
    assert not found.refused
    assert [line for line in found.noted if line.startswith(said)] and len(found.noted) == 1, found.noted


def test_a_plugin_class_inherits_keys_with_their_class_and_its_own_are_identity(trained: Path) -> None:
    registry = Registry()
    longer = registry.load("forge.schedules", f"{trained / 'mine.py'}:Longer")
    assert {info.name: info.key_class for info in fields_of(longer)} == {"warmup": KeyClass.FREE, "extra": KeyClass.IDENTITY}


def test_a_transform_of_a_plugin_changes_the_function_until_it_says_otherwise(trained: Path) -> None:
    (trained / "transform.py").write_text(
        "from dataclasses import dataclass\nfrom typing import ClassVar\nfrom forge_core.component import LAYOUT, Component\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Adds(Component):\n    def build(self): ...\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Places(Component):\n"
        "    key_class: ClassVar = LAYOUT\n    def build(self): ...\n"
    )
    trust_file(trained / "transform.py")
    registry = Registry()

    def between(before: str, now: str) -> tuple[str, KeyClass]:
        chosen = [{"mine": {"name": f"{trained / 'transform.py'}:{name}"}} if name else {} for name in (before, now)]
        (change,) = changes(*(walk(Job, _tree({"transforms": found}), registry) for found in chosen), registry)
        return change.key, change.key_class

    for name, key_class in (("Adds", KeyClass.IDENTITY), ("Places", KeyClass.LAYOUT)):
        assert between("", name) == between(name, "") == ("transforms.mine", key_class)
    assert between("Adds", "Places") == between("Places", "Adds") == ("transforms.mine.name", KeyClass.IDENTITY)


def test_secrets_compare_as_equal_and_are_never_said(trained: Path) -> None:
    found = resumed(trained, "--hooks.1.api_key=sk-2")
    assert not found.refused and not found.noted
    whole = str(resumed(trained, "--hooks=[{name='" + str(trained / "mine.py") + ":Mine', api_key='sk-3'}]"))
    assert "sk-" not in whole and "(hidden)" in whole


def test_texts_of_a_model_that_look_like_secrets_are_compared_all_the_same(trained: Path) -> None:
    """The model's part of a checkpoint keeps what other parts hide."""

    def other(meta: dict[str, Any]) -> None:
        meta["config"]["model"]["attention"]["core"] = "flex"

    assert [line.split()[0] for line in resumed(trained, change=other).noted] == ["model.attention.core"]


def test_an_allowed_name_must_be_a_key(trained: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.allow: 'model\.rope\.thetta' is not a key.*model\.rope\.theta"):
        resumed(trained, "--model.rope.theta=10", "--checkpoint.allow=model.rope.thetta")
    with pytest.raises(ConfigError, match="model"):
        prepared(trained / "tiny.toml", [f"--job.dir={trained / 'new'}", "--checkpoint.allow=model.thetta"])
    assert not resumed(trained, "--checkpoint.allow=model.rope.theta").refused, "a key that did not change may be named"


def test_a_checkpoint_of_an_older_version_lacks_keys_and_has_some_that_are_gone(trained: Path) -> None:
    def older(meta: dict[str, Any]) -> None:
        del meta["config"]["model"]["rope"]["theta"], meta["config"]["objective"], meta["config"]["checkpoint"]["allow"]
        meta["config"]["model"]["curvature"] = 3

    found = resumed(trained, change=older)
    assert not found.refused and found.noted == ("model.curvature was 3; this version does not have this key",)
    assert list(resumed(trained, "--model.rope.theta=10", change=older).refused) == ["model.rope.theta"]
    allowed = resumed(trained, "--checkpoint.allow=model.curvature", change=older)
    assert not allowed.refused, "a name that the checkpoint knows"

    def after(meta: dict[str, Any]) -> None:
        meta["config"]["checkpoint"]["allow"] = "model.curvature"

    assert not resumed(trained, "--checkpoint.allow=model.curvature", change=after).refused, "the same command, a resume later"


def test_a_checkpoint_without_a_recipe_is_taken_as_it_is(trained: Path) -> None:
    found = resumed(trained, "--model.rope.theta=10", change=lambda meta: meta.pop("config"))
    assert not found.refused and "has no recipe" in found.noted[0]


def test_the_same_name_from_another_distribution_is_another_component(trained: Path) -> None:
    def foreign(meta: dict[str, Any]) -> None:
        for item in meta["plugins"]:
            if item["name"] in ("swiglu", "cosine"):
                item["distribution"] = "forge-elsewhere"

    found = resumed(trained, change=foreign)
    assert list(found.refused) == ["model.mlp.name"]
    assert "forge-elsewhere:swiglu" in found.refused["model.mlp.name"]
    assert [line.split()[0] for line in found.noted] == ["schedule.name"]


def test_fault_50_another_version_of_a_plugin_is_listed(trained: Path) -> None:
    def older(meta: dict[str, Any]) -> None:
        for item in meta["plugins"]:
            if item["distribution"] == "forge-models":
                item["version"] = "1.9"

    (line,) = resumed(trained, change=older).noted
    assert line.startswith("forge-models was 1.9, is ")


def test_w2_every_leaf_of_a_resolved_recipe_has_a_class(trained: Path) -> None:
    """No key of a real recipe falls outside of what fields declare."""
    resolved = load_recipe("demo", [], 1, Registry())
    fields = resolved.outcome.fields
    for key, _, _ in leaves(resolved.tree):
        at = key
        while at not in fields:
            at = at.rpartition(".")[0]
            assert at, key
        assert fields[at].declared_class is not None, key


def test_fault_22_all_faults_of_a_resume_are_one_message_that_names_the_ways_out(trained: Path) -> None:
    changes = ["--model.rope.theta=10", "--job.seed=7", "--model.mlp.name=geglu"]
    where = [f"--job.dir={trained / 'run'}", "--train.max_steps=2", "--schedule.warmup=0"]
    with pytest.raises(CheckpointError) as found:
        prepared(trained / "tiny.toml", [*where, *changes])
    said = str(found.value)
    for words in (
        "model.rope.theta was 10000.0, is 10",
        "job.seed was 3, is 7",
        "seed was 3, is 7",
        'checkpoint.allow = ["job.seed", "model.rope.theta", "model.mlp.name"]',
        "--fresh",
        "job.name",
        "data.changed",
    ):
        assert words in said, said
    with pytest.raises(CheckpointError, match=r"--checkpoint\.allow=model\.rope\.theta"):
        prepared(trained / "tiny.toml", [*where, changes[0]])


def test_w2_an_allowed_change_is_trained_with(trained: Path) -> None:
    where = [f"--job.dir={trained / 'run'}", "--train.max_steps=2", "--schedule.warmup=0"]
    run, _ = prepared(trained / "tiny.toml", [*where, "--model.rope.theta=10", "--checkpoint.allow=model.rope.theta"])
    assert (run.state.step, run.job.model.rope.theta) == (2, 10)


def test_walk_of_a_checkpoint_and_of_a_recipe_agree_on_lists(trained: Path) -> None:
    """A list that became longer or holds other kinds is one change, not one for each place behind it."""
    hooks = [{"name": "log", "every": 10}, {"name": "save"}]
    before = walk(Job, _tree({"hooks": hooks}), Registry())
    now = walk(Job, _tree({"hooks": hooks[1:]}), Registry())
    (change,) = changes(before, now, Registry())
    assert (change.key, change.key_class) == ("hooks", KeyClass.FREE)


def _tree(config: dict[str, Any]) -> Table:
    table = build(config, (), lambda _: DEFAULT, Path.cwd())
    assert isinstance(table, Table)
    return table
