"""`check` tells all faults in one round, and those that only a run would have met."""

from pathlib import Path

import pytest

from forge_core.config.checks import Parts, run_checks
from forge_core.config.tree import Table
from forge_core.errors import Caution, ConfigError, Fault
from forge_core.registry import Entry, Registry
from forge_train.recipe.load import load
from train.runs import TINY

REGISTRY = Registry()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path / "tiny.toml"


def faults(recipe: Path, world: int, *overrides: str) -> dict[str, Fault]:
    with pytest.raises(ConfigError) as refusal:
        load(recipe, overrides, world, REGISTRY, here=True)
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
    load(tiny, [text], 1, REGISTRY, here=True)
    load(tiny, [f"--data.sources=[{listed}]"], 1, REGISTRY, here=True)
    bpe = f"--data.tokenizer={{name='bpe', path='{tmp_path}/vocabulary.json'}}"
    load(tiny, [bpe], 1, REGISTRY, here=True)
    (tmp_path / "vocabulary.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 61}]}')
    assert "62 ids" in faults(tiny, 1, bpe)["data.tokenizer.name"].message


def test_m1_a_file_that_is_absent_stops_a_run_here_and_is_told_of_elsewhere(tiny: Path) -> None:
    gone = ["--data.sources=[{name='store', path='/no/such'}]"]
    (warning,) = load(tiny, gone, 1, REGISTRY).warnings
    assert "data.sources.0.path" in warning and "/no/such" in warning
    (warning,) = load("7b", [], 64, REGISTRY).warnings
    assert "corpus" in warning, "a preset's placeholder"


def test_trials_h_a_plan_which_reads_no_data_does_not_miss_a_corpus(tiny: Path) -> None:
    assert load("7b", [], 64, REGISTRY, here=None).warnings == ()
    (warning,) = load(tiny, ["--hooks=[]", "--data.sources=[{name='store', path='/no/such'}]"], 1, REGISTRY, here=None).warnings
    assert "no checkpoint" in warning


def test_m1_a_run_that_saves_nothing_is_warned_of(tiny: Path) -> None:
    assert load(tiny, [], 1, REGISTRY).warnings == ()
    (warning,) = load(tiny, ["--hooks=[]"], 1, REGISTRY).warnings
    assert "no checkpoint" in warning and "hooks" in warning


def test_m1_a_tokenizer_that_may_learn_too_much_is_warned_of(tiny: Path) -> None:
    (warning,) = load(tiny, ["--data.tokenizer={name='bpe', vocab_size=300}"], 1, REGISTRY).warnings
    assert "data.tokenizer.vocab_size" in warning


def test_m1_an_empty_recipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert faults(tmp_path / "empty.toml", 1).keys() == {"data.sources"}


def test_a_check_ends_where_it_asks_for_what_is_wrong_and_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(job: object, layout: object) -> object:
        yield Fault("first", f"told of {job.right}")
        yield Caution("second", "only said")
        yield Fault("third", f"never told of {getattr(job, 'wrong', None)}")

    registry = Registry([Entry("forge.checks", "mine", "forge-mine", "1", "nowhere:check")])
    monkeypatch.setattr(registry, "load_entry", lambda _: check)
    found, warnings = run_checks(Parts({"right": 1}), None, registry, Table({}, ""))
    assert [fault.key for fault in found] == ["first"]
    assert warnings == ["second: only said"]


def test_e7_a_sample_that_the_model_cannot_take_is_refused_before_training(tiny: Path) -> None:
    found = faults(tiny, 1, "--hooks.1.name=sample", "--hooks.1.max_tokens=32")
    assert "max_length = 32" in found["hooks.1.max_tokens"].message
    assert load(tiny, ["--hooks.1.name=sample", "--hooks.1.max_tokens=31"], 1, REGISTRY)


@pytest.mark.parametrize(("policy", "named"), [("selective", True), ("full", False)])
def test_e7_a_schedule_that_splits_the_backward_names_the_transform_that_needs_it_whole(
    tiny: Path, policy: str, named: bool
) -> None:
    found = faults(tiny, 2, "--parallel.pp=2", "--parallel.pipeline.schedule.name=zbv", f"--transforms.recompute.policy={policy}")
    assert ("transforms.recompute" in found) == named
