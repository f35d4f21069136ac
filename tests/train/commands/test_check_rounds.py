"""`check` tells all faults in one round, and those that only a run would have met."""

import random
from pathlib import Path

import pytest

from forge_core.config.tree import Table
from forge_core.config.validation import PartialRecipe, run_checks
from forge_core.errors import ConfigError, Fault, RecipeWarning
from forge_core.registry import Entry, Registry
from forge_train.recipe.load import load_recipe
from train.runs import TINY

REGISTRY = Registry()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path / "tiny.toml"


def faults(recipe: Path, world: int, *overrides: str) -> dict[str, Fault]:
    with pytest.raises(ConfigError) as refusal:
        load_recipe(recipe, overrides, world, REGISTRY, here=True)
    return {fault.key: fault for fault in refusal.value.faults}


def test_m1_faults_of_fields_sections_batches_data_and_layout_come_in_one_round(tiny: Path) -> None:
    found = faults(
        tiny,
        6,
        "--optimizer.lrr=1",  # no such key
        "--schedule.warmup=-1",  # out of range
        "--train.global_batch=9",  # not shared by two data ranks
        "--data.sequence_length=40",  # longer than the model
        "--data.sources=[{name='store', path='/no/such'}]",
        "--parallel.tp=3",  # does not divide heads, nor sequences
    )
    assert found.keys() == {
        "optimizer.lrr",
        "schedule.warmup",
        "train.global_batch",
        "data.sequence_length",
        "data.sources.0.path",
        "model.heads",
    }
    assert all(fault.origin for fault in found.values())


def test_m1_a_wrong_section_or_layout_hides_only_what_depends_on_it(tiny: Path) -> None:
    assert faults(tiny, 2, "--model.heads=five", "--train.global_batch=7").keys() == {"model.heads", "train.global_batch"}
    found = faults(tiny, 3, "--parallel.tp=2", "--data.sequence_length=40", "--train.global_batch=7")
    assert found.keys() == {"parallel", "data.sequence_length"}, "how rows are shared depends on the layout"


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("--model.layers=100000000000000000000000", "model.layers", "64 bits"),
        ("--model.layers=1000000000000000", "model.layers", "parameters"),
        ("--train.max_steps=1000000000000000000", "train.max_steps", "64 bits"),
        ("--data.sources=[]", "data.sources", "nothing to train on"),
        ("--data.sources=[{name='text', path='no/*.txt'}]", "data.sources.0.path", "matches no file"),
        ("--data.sources=[{name='megatron', path='corpus'}]", "data.sources.0.path", "does not exist"),
        ("--data.evaluation.held={name='jsonl', path='none.jsonl'}", "data.evaluation.held.path", "does not exist"),
        ("--data.tokenizer={name='sentencepiece', path='none.model'}", "data.tokenizer.path", "does not exist"),
        ("--data.tokenizer={name='bpe', files=['none*'], vocab_size=300}", "data.tokenizer.files.0", "matches no file"),
        ("--data.tokenizer={name='bytes'}", "data.tokenizer.name", "257 ids, more than the model's vocabulary of 61"),
        ("--data.tokenizer={name='tiktoken'}", "data.tokenizer.name", "50257"),
        ("--data.sources=[{name='random', vocab_size=62}]", "data.sources.0.vocab_size", "vocabulary of 61"),
    ],
)
def test_m1_what_a_run_would_meet(tiny: Path, override: str, key: str, words: str) -> None:
    fault = faults(tiny, 1, override)[key]
    assert words in fault.message
    assert fault.origin == override.partition("=")[0] or fault.origin.startswith("--")


def test_m1_files_that_are_there_are_no_fault(tiny: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    text = f"--data.sources=[{{name='store', path='{store}'}}]"
    assert "manifest.json" in faults(tiny, 1, text)["data.sources.0.path"].message
    (store / "manifest.json").write_text("{}")
    (tmp_path / "corpus_text_document.idx").write_text("")
    (tmp_path / "vocabulary.json").write_text('{"model": {"vocab": {"a": 0, "b": 60}}, "added_tokens": [{"id": 59}]}')
    several = [{"name": "megatron", "path": f"{tmp_path}/corpus_text_document"}, {"name": "text", "path": f"{tmp_path}/*.idx"}]
    several += [{"name": "text", "path": "s3://bucket/all"}, {"name": "huggingface", "path": "someone/corpus"}]
    listed = ", ".join(f"{{name='{one['name']}', path='{one['path']}'}}" for one in several)
    load_recipe(tiny, [text], 1, REGISTRY, here=True)
    load_recipe(tiny, [f"--data.sources=[{listed}]"], 1, REGISTRY, here=True)
    bpe = f"--data.tokenizer={{name='bpe', path='{tmp_path}/vocabulary.json'}}"
    load_recipe(tiny, [bpe], 1, REGISTRY, here=True)
    (tmp_path / "vocabulary.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 61}]}')
    assert "62 ids" in faults(tiny, 1, bpe)["data.tokenizer.name"].message


def test_m1_a_file_that_is_absent_stops_a_run_here_and_is_told_of_elsewhere(tiny: Path) -> None:
    gone = ["--data.sources=[{name='store', path='/no/such'}]"]
    (warning,) = load_recipe(tiny, gone, 1, REGISTRY).warnings
    assert "data.sources.0.path" in warning and "/no/such" in warning
    (warning,) = load_recipe("7b", [], 64, REGISTRY).warnings
    assert "corpus" in warning, "a preset's placeholder"


def test_trials_h_a_plan_which_reads_no_data_does_not_miss_a_corpus(tiny: Path) -> None:
    assert load_recipe("7b", [], 64, REGISTRY, here=None).warnings == ()
    (warning,) = load_recipe(
        tiny, ["--hooks=[]", "--data.sources=[{name='store', path='/no/such'}]"], 1, REGISTRY, here=None
    ).warnings
    assert "no checkpoint" in warning


def test_m1_a_run_that_saves_nothing_is_warned_of(tiny: Path) -> None:
    assert load_recipe(tiny, [], 1, REGISTRY).warnings == ()
    (warning,) = load_recipe(tiny, ["--hooks=[]"], 1, REGISTRY).warnings
    assert "no checkpoint" in warning and "hooks" in warning


def test_m1_a_tokenizer_that_may_learn_too_much_is_warned_of(tiny: Path) -> None:
    text = ["--data.tokenizer={name='bpe', vocab_size=300}", "--data.sources=[{name='stdlib'}]"]
    (warning,) = load_recipe(tiny, text, 1, REGISTRY).warnings
    assert "data.tokenizer.vocab_size" in warning


def test_m1_an_empty_recipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert faults(tmp_path / "empty.toml", 1).keys() == {"data.sources"}


def test_a_check_ends_where_it_asks_for_what_is_wrong_and_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(job: object, layout: object) -> object:
        yield Fault("first", f"told of {job.right}")
        yield RecipeWarning("second", "only said")
        yield Fault("third", f"never told of {getattr(job, 'wrong', None)}")

    registry = Registry([Entry("forge.checks", "mine", "forge-mine", "1", "nowhere:check")])
    monkeypatch.setattr(registry, "load_entry", lambda _: check)
    found, warnings = run_checks(PartialRecipe({"right": 1}), None, registry, Table({}, ""))
    assert [fault.key for fault in found] == ["first"]
    assert warnings == ["second: only said"]


def test_e7_a_sample_that_the_model_cannot_take_is_refused_before_training(tiny: Path) -> None:
    found = faults(tiny, 1, "--hooks.1.name=sample", "--hooks.1.max_tokens=32")
    assert "max_length = 32" in found["hooks.1.max_tokens"].message
    assert load_recipe(tiny, ["--hooks.1.name=sample", "--hooks.1.max_tokens=31"], 1, REGISTRY)


@pytest.mark.parametrize(("policy", "named"), [("selective", True), ("full", False)])
def test_e7_a_schedule_that_splits_the_backward_names_the_transform_that_needs_it_whole(
    tiny: Path, policy: str, named: bool
) -> None:
    found = faults(tiny, 2, "--parallel.pp=2", "--parallel.pipeline.schedule.name=zbv", f"--transforms.recompute.policy={policy}")
    assert ("transforms.recompute" in found) == named


ALONE = {
    "optimizer.lrr": ("1",),
    "optimizer.lr": ("-1.0", "fast", "nan", "[1]"),
    "optimizer.betas": ("[0.9]", "1", "[0.9, 1.5]"),
    "schedule.warmup": ("-1", "2.5", "true"),
    "schedule.wramup": ("3",),
    "schedule.decay_": ("{a = 1}",),
    "train.max_step": ("3",),
    "train.grad_clip": ("-1.0", "big"),
    "train.max_skipped": ("0", "1.5"),
    "train.rollback_lr": ("2.0",),
    "job.seed": ("-3", "99999999999999999999"),
    "job.name": ("a/b", ".hidden", "a\nb", "a\tb", "x" * 300, "a\u2028b"),
    "job.dirr": ("x",),
    "precision.compute": ("fp7", "1"),
    "precision.stat": ("fp32",),
    "parallel.timeout": ("0", "soon"),
    "parallel.timeuot": ("3",),
    "checkpoint.every": ("-1", "often"),
    "checkpoint.evry": ("5",),
    "data.packign": ("pad",),
    "data.sources.0.vocab_sze": ("5",),
    "hooks.0.every_": ("5",),
    "hooks.0.nam": ("x",),
    "trackers.0.name": ("no_such_tracker",),
    "colour": ("red",),
    "model.dropout_": ("0.1",),
}
"""Values that are wrong by themselves: unknown keys, types, ranges, names."""

TOGETHER = {
    "train.global_batch": ("9", "7"),
    "data.sequence_length": ("40",),
    "data.sources.0.vocab_size": ("62",),
}
"""Values that are wrong because of others, in the world of two that the test asks for."""


def test_trials_200_bad_recipes_are_refused_alike_and_in_one_round(tiny: Path) -> None:
    """Each recipe has two to five faults. `check` and `run` name the same ones, all of them, and nothing else."""
    draw, seen = random.Random(11), 0
    pool = {**ALONE, **TOGETHER}
    for _ in range(200):
        bad = {key: draw.choice(pool[key]) for key in draw.sample(sorted(pool), draw.randint(2, 5))}
        overrides = [f"--{key}={value}" for key, value in bad.items()]
        said = []
        for here in (False, True):
            with pytest.raises(ConfigError) as refusal:
                load_recipe(tiny, overrides, 2, REGISTRY, here=here)
            said.append(sorted(str(fault) for fault in refusal.value.faults))
        assert said[0] == said[1], overrides
        named = {fault.key for fault in refusal.value.faults}
        assert {key for key in bad if not any(each == key or each.startswith(f"{key}.") for each in named)} == set(), (
            bad,
            said[0],
        )
        assert all(any(each == key or each.startswith(f"{key}.") for key in bad) for each in named), (bad, said[0])
        seen += len(named)
    assert seen > 600


def test_trials_f7_a_wrong_key_hides_nothing_of_its_table(tiny: Path) -> None:
    assert faults(tiny, 2, "--train.max_step=3", "--train.global_batch=9").keys() == {"train.max_step", "train.global_batch"}
    assert faults(tiny, 2, "--train.grad_clip=x", "--train.global_batch=9").keys() == {"train.grad_clip", "train.global_batch"}
    assert faults(tiny, 2, "--job.seed=x", "--job.name=a/b").keys() == {"job.seed", "job.name"}, "a rule of the table itself"
    found = faults(tiny, 1, "--model.dropot=0.1", "--data.sequence_length=40", "--model.heads=3")
    assert {"model.dropot"} < found.keys() and len(found) >= 2


@pytest.mark.parametrize("open_close", ["[]", "{a=}"])
def test_trials_f7_what_stands_too_deep_in_each_other_is_refused(tmp_path: Path, open_close: str) -> None:
    opened, closed = open_close[:-1], open_close[-1]
    for depth in (70, 400, 5000):
        value = opened * depth + ("1" if opened != "[" else "") + closed * depth
        (tmp_path / "deep.toml").write_text(f'base = "debug"\n[model]\nx = {value}\n')
        assert "60 levels deep" in faults(tmp_path / "deep.toml", 1).popitem()[1].message
        (tmp_path / "plain.toml").write_text('base = "debug"\n')
        assert "60 levels deep" in faults(tmp_path / "plain.toml", 1, f"--model.x={value}")["model.x"].message
    (tmp_path / "deep.toml").write_text(f'base = "debug"\n[{".".join("a" * 5000)}]\nx = 1\n')
    assert "60 levels deep" in faults(tmp_path / "deep.toml", 1).popitem()[1].message
    assert "60 levels deep" in faults(tmp_path / "plain.toml", 1, f"--{'.'.join('a' * 500)}=1").popitem()[1].message


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ('[job]\nname = "a\\u0000b"', "job.name", "NUL"),
        ('[job]\nname = "a\\nb"', "job.name", "a line break"),
        ('[job]\ndir = "a\\u0000b"', "job.dir", "NUL"),
        ('[job]\ndir = "a\\u0085b"', "job.dir", "a line break"),
        ('[start]\nweights = "a\\rb"', "start.weights", "a line break"),
        ('[data.evaluation."a\\nb"]\nname = "random"', 'data.evaluation."a\\nb"', "a key that contains a line break"),
        ('[[data.sources]]\nname = "text"\npath = "a\\u0000*"', "data.sources.0.path", "NUL"),
        ('[[data.sources]]\nname = "text"\npath = "a\\u001bb"', "data.sources.0.path", "a control character"),
    ],
)
def test_trials_f7_names_of_files_have_no_control_characters(tmp_path: Path, text: str, key: str, words: str) -> None:
    (tmp_path / "r.toml").write_text(f'base = "debug"\n{text}\n')
    assert words in faults(tmp_path / "r.toml", 1)[key].message


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (("--data.tokenizer.name=bpe",), "data.tokenizer.path", "no text to train a tokenizer on"),
        (("--data.sources.0.tokens=16",), "data.sources.0.tokens", "fewer than the 17 tokens of one sample"),
    ],
)
def test_data_from_which_no_step_can_be_made_are_refused_before_a_run(
    tiny: Path, overrides: tuple[str, ...], key: str, words: str
) -> None:
    assert words in faults(tiny, 1, *overrides)[key].message
    assert load_recipe(tiny, ["--data.sources.0.tokens=17"], 1, REGISTRY)
