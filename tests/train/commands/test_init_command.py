"""The first screen, and `forge-train init`: five questions, a recipe that `check` accepts, three commands that follow."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import typer

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_data import example_corpus
from forge_models.flops import count_flops
from forge_train import cli
from forge_train.commands import init as command
from forge_train.recipe.data_path import DataPath
from forge_train.recipe.draft import RecipeAnswers, commands, draft
from forge_train.recipe.load import load_recipe
from forge_train.recipe.scale import Scale
from harness import commands as processes

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Exit code, output and errors of a command, run in an empty directory without a terminal."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def test_the_first_screen_has_three_commands_that_exist(say: Say) -> None:
    code, said, _ = say()
    assert code == 2 and len(said.splitlines()) < 15
    named = re.findall(r"^  forge-train (\S+)", said, re.MULTILINE)
    assert named == ["run", "init", "doctor"] and set(named) <= set(Registry().names("forge.commands"))
    assert "forge-train run demo" in said and "demo" in Registry().names("forge.presets")
    assert "forge-train --help" in said


FIRST_IMPORTS = """
import sys
from forge_train.cli import main
for words, expected in (([], 2), (["init", "--scale", "125m"], None)):
    try:
        main(words)
    except SystemExit as end:
        assert (end.code or 0) == (expected or 0), end.code
    if not words:
        assert "forge_train.recipe" not in sys.modules and "pydantic" not in sys.modules
assert "torch" not in sys.modules
"""


def test_the_first_screen_and_init_import_no_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_IMPORTS], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "recipe.toml").is_file()


def test_a_shell_that_asks_for_completion_gets_no_screen() -> None:
    environment = {**os.environ, "_FORGE_TRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "forge-train in", "COMP_CWORD": "1"}
    done = processes.run("-m", "forge_train", env=environment, torch=False)
    assert done.stdout.split() == ["init"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A path of every kind of data by the name of its source, and files of tokenizers."""
    found = {"stdlib": "stdlib", "huggingface": "huggingface:owner/name"}
    for make in ("jsonl", "parquet", "arrow", "store", "npy", "megatron", "llmc", "datatrove"):
        folder = tmp_path_factory.mktemp(make)
        found["tokens" if make == "npy" else make] = getattr(example_corpus, make)(folder)
    text = tmp_path_factory.mktemp("text")
    for number in range(200):
        (text / f"{number}.txt").write_text("one sentence after the other. " * 500)
    found["text"] = str(text)
    found["pieces"] = example_corpus.pieces(tmp_path_factory.mktemp("pieces"))
    from tokenizers import Tokenizer, models

    (tmp_path_factory.mktemp("json") / "tokenizer.json").write_text("")
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    ids = {chr(256 + number): number for number in range(299)} | {"<|endoftext|>": 299}
    Tokenizer(models.BPE(vocab=ids, merges=[])).save(str(path))
    found["json"] = str(path)
    return found


TEXTS = ("stdlib", "text", "jsonl", "parquet", "arrow", "huggingface")
TOKENS = ("store", "tokens", "megatron", "llmc", "datatrove")


def combinations(places: dict[str, str]) -> Iterator[RecipeAnswers]:
    """Every combination of answers: kinds of data and tokenizers, small or scaled, CPU or GPUs, default length or other."""
    data = [(kind, tokenizer, None) for kind in TEXTS for tokenizer in ("bpe", "bytes", "gpt2", "json", "pieces")]
    data += [(kind, None, 300) for kind in TOKENS]
    paths = {kind: DataPath.of(places[kind]) for kind in (*TEXTS, *TOKENS)}
    for (kind, tokenizer, ids), scale, gpus, tokens in product(
        data, (None, 40_000_000, 13_000_000_000), (0, 8), (None, 7_000_000)
    ):
        given = places.get(tokenizer or "", tokenizer)
        yield RecipeAnswers("recipe.toml", paths[kind], given, ids, scale, gpus, tokens)


def test_check_accepts_every_combination_of_answers(places: dict[str, str], tmp_path: Path) -> None:
    """For the number of processes that was answered; a plain `check` counts one process and accepts it, too."""
    registry, path, seen = Registry(), tmp_path / "recipe.toml", 0
    for answers in combinations(places):
        try:
            written = draft(answers)
        except ForgeError as refusal:  # seven million tokens are too few for the batches of 13 billion parameters on 8 GPUs
            assert answers.tokens is not None and answers.scale is not None, refusal
            continue
        path.write_text(written.text)
        recipe = load_recipe(path, (), max(1, answers.gpus), registry)
        assert recipe.warnings == (), (answers, recipe.warnings)
        assert recipe.job.job.name == "recipe" and recipe.job.precision.compute == ("bf16" if answers.gpus else "fp32")
        length = recipe.job.train.max_steps * recipe.job.train.global_batch * recipe.job.data.sequence_length
        if answers.tokens is not None:
            assert 0 <= length - answers.tokens < recipe.job.train.global_batch * recipe.job.data.sequence_length
        seen += 1
    assert seen > 350


def test_the_kind_of_the_data_is_found(places: dict[str, str], tmp_path: Path) -> None:
    for kind in (*TEXTS, *TOKENS):
        assert DataPath.of(places[kind]).source == kind
    for kind in ("jsonl", "parquet", "arrow"):
        assert DataPath.of(str(Path(places[kind]).parent)).source == kind, "a directory of such files"
        assert DataPath.of(f"text:{places[kind]}").source == "text", "as it is asked for"
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    (saved / "data.arrow").write_text("")
    assert DataPath.of(str(saved)).source == "huggingface"
    assert DataPath.of("s3://bucket/a.jsonl.gz") == DataPath("jsonl", "s3://bucket/a.jsonl.gz")
    assert DataPath.of(f"{places['text']}/**/*.txt").source == "text"
    assert DataPath.of("text:s3://bucket/all") == DataPath("text", "s3://bucket/all")


def test_files_are_held_out_if_there_are_enough(places: dict[str, str], tmp_path: Path) -> None:
    assert DataPath.of(places["text"]).held_out and DataPath.of("stdlib").held_out
    for number in range(200):
        (tmp_path / f"{number}.md").write_text("short")
    assert not DataPath.of(str(tmp_path)).held_out
    (tmp_path / "0.md").write_text("long " * 100_000)
    assert not DataPath.of(str(tmp_path / "0.md")).held_out, "one file cannot be in both"
    text = draft(RecipeAnswers("a.toml", DataPath.of(str(tmp_path / "0.md")))).text
    assert "evaluat" not in text


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "huggingface"])
def test_the_lines_for_an_evaluation_of_records_are_accepted(places: dict[str, str], kind: str, tmp_path: Path) -> None:
    data = DataPath.of(places[kind])
    text = draft(RecipeAnswers("a.toml", data)).text
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("# To evaluate on a part")) + 1
    for number in range(first, lines.index("[train]") - 1):
        lines[number] = lines[number].removeprefix("# ")
    (tmp_path / "a.toml").write_text("\n".join([*lines, "[[hooks]]", 'name = "evaluate"']))
    job = load_recipe(tmp_path / "a.toml", (), 1).job
    assert (job.data.sources[0].split, job.data.evaluation["held_out"].split) == ("train", "held_out")
    assert job.data.evaluation["held_out"].path == data.path


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--data", "nowhere"], ["--data nowhere does not exist", "huggingface:OWNER/NAME", "stdlib"]),
        (["--data", "text:nowhere"], ["--data nowhere does not exist"]),
        (["--data", "corpus/**/*.txt"], ["does not exist"]),
        (["--data", " "], ["--data is empty"]),
        (["--data", "jsonl:"], ["--data jsonl:", "is missing"]),
        (["--data", "s3://bucket/all"], ["s3://bucket/all", "jsonl:s3://bucket/all"]),
        (["--data", "mixed"], ["several formats (jsonl, text)", "jsonl:mixed"]),
        (["--data", "empty"], ["--data empty", "a folder without files"]),
        (["--data", "raw.npy"], ["--vocab-size is missing"]),
        (["--data", "raw.npy", "--vocab-size", "9", "--tokenizer", "bpe"], ["--tokenizer bpe", "token ids (tokens)"]),
        (["--tokenizer", "gpt3"], ["--tokenizer gpt3", "bpe, bytes, gpt2"]),
        (["--tokenizer", "notes.txt"], ["--tokenizer notes.txt: the file is no tokenizer.json"]),
        (["--tokenizer", "bytes", "--vocab-size", "300"], ["--vocab-size"]),
        (["--vocab-size", "256"], ["--vocab-size 256", "257"]),
        (["--scale", "9m"], ["--scale 9M", "10M to 500B"]),
        (["--scale", "big"], ["'big'", "125m"]),
        (["--scale", "10m", "--vocab-size", "200064"], ["--scale 10M", "200,064"]),
        (["--scale", "125m", "--gpus", "1000"], ["--gpus 1000", "at most"]),
        (["--tokens", "10k"], ["--tokens 10K", "at least 41K tokens"]),
        (["--tokens", "none"], ["'none'"]),
        (["mine.yaml"], ["mine.yaml", ".toml"]),
        (["x" * 201 + ".toml"], ["at most 200 bytes"]),
        (["a\nb/c.toml"], ["control character", "rename"]),
        (["--data", "huggingface:a\tb"], ["control character", "rename"]),
        (["--data", "huggingface:a\udcffb"], ["not UTF-8"]),
        (["folder.toml"], ["folder.toml is a directory"]),
        (["mixed/a.txt/b.toml"], ["mixed/a.txt/b.toml cannot be written"]),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else None,
)
def test_wrong_answers_are_refused_by_their_flag_and_write_nothing(
    say: Say, tmp_path: Path, arguments: list[str], named: list[str]
) -> None:
    for folder in ("mixed", "empty", "folder.toml"):
        (tmp_path / folder).mkdir()
    for name in ("mixed/a.txt", "mixed/b.jsonl", "notes.txt"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "raw.npy").write_bytes(Path(example_corpus.npy(tmp_path)).read_bytes())
    before = sorted(tmp_path.rglob("*"))
    code, _, errors = say("init", *arguments)
    assert code == 2 and "Traceback" not in errors
    for text in named:
        assert text in errors
    assert sorted(tmp_path.rglob("*")) == before


def test_a_recipe_is_never_replaced_unless_asked(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.toml").write_text("mine")
    code, _, errors = say("init")
    assert code == 2 and "recipe.toml exists" in errors and "--force" in errors
    monkeypatch.setattr(command, "_check_file", lambda *_: None)  # as if it appeared while questions were asked
    code, _, errors = say("init")
    assert code == 2 and "recipe.toml exists" in errors
    assert (tmp_path / "recipe.toml").read_text() == "mine"
    assert say("init", "--force")[0] == 0
    assert load_recipe(tmp_path / "recipe.toml", (), 1).job.job.name == "recipe"
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def test_programs_get_json(say: Say, tmp_path: Path) -> None:
    code, said, _ = say("init", "new/mine.toml", "--scale", "350m", "--gpus", "2", "--tokens", "20b", "--json")
    found = json.loads(said)
    job = load_recipe(tmp_path / "new/mine.toml", (), 2).job
    assert code == 0 and found["ok"] is True and found["file"] == "new/mine.toml"
    assert found["parameters"] == count_flops(job.model.shape).parameters
    assert (found["scale"]["tokens"], found["scale"]["lr"]) == (20_000_000_000, job.optimizer.lr)
    shape = found["scale"]["shape"]
    assert (shape["layers"], shape["dim"], shape["ffn_dim"]) == (job.model.layers, job.model.dim, job.model.ffn_dim)
    assert found["next"] == list(commands("new/mine.toml", 2)) and found["notes"]
    code, said, _ = say("init", "new/mine.toml", "--json")
    assert code == 2 and json.loads(said)["ok"] is False


def test_a_recipe_names_the_sources_of_its_numbers(tmp_path: Path) -> None:
    text = draft(RecipeAnswers("a.toml", DataPath.of("stdlib"), scale=7_000_000_000, gpus=64)).text
    for source in ("Levine et al., 2020", "Hoffmann et al., 2022", "Bi et al., 2024", "Ainslie et al., 2023"):
        assert source in text
    assert "Beyond the fitted range: depth" in text
    recipe = tomllib.loads(text)
    assert recipe["model"]["init_std"] == 0.006 and recipe["optimizer"]["betas"] == [0.9, 0.95]
    assert (recipe["optimizer"]["weight_decay"], recipe["train"]["grad_clip"]) == (0.1, 1.0)
    (tmp_path / "a.toml").write_text(text)
    job = load_recipe(tmp_path / "a.toml", (), 64).job
    assert (job.schedule.at, job.schedule.factors) == ((0.8, 0.9), (0.316, 0.1)), "Bi et al., section 2.3"
    assert job.schedule.warmup == min(2000, job.train.max_steps // 20)
    parameters = count_flops(job.model.shape).parameters
    tokens = job.train.max_steps * job.train.global_batch * job.data.sequence_length
    assert tokens == pytest.approx(20 * parameters, rel=1e-3)


def test_the_small_recipe_is_that_of_the_demo() -> None:
    """Its model, its optimizer, its length, and how often it evaluates."""
    recipe = tomllib.loads(draft(RecipeAnswers("a.toml", DataPath.of("stdlib"))).text)
    demo = tomllib.loads(Registry().load("forge.presets", "demo").read_text())
    for section in ("model", "optimizer", "schedule", "train"):
        assert recipe[section] == demo[section]
    every = {hook["name"]: hook.get("every") for hook in demo["hooks"]}
    assert {hook["name"]: hook.get("every") for hook in recipe["hooks"]} == every


@pytest.mark.parametrize(
    ("scale", "micro_batch", "recompute", "reduce"),
    [
        *((350_000_000, 8, None, None), (1_300_000_000, 2, "selective", None)),
        *((7_000_000_000, 1, "full", None), (13_000_000_000, 1, "full", "each")),
    ],
)
def test_larger_models_save_memory(scale: int, micro_batch: int, recompute: str | None, reduce: str | None) -> None:
    """As the presets of these sizes do."""
    recipe = tomllib.loads(draft(RecipeAnswers("a.toml", DataPath.of("stdlib"), scale=scale, gpus=8)).text)
    transforms = recipe.get("transforms", {})
    assert recipe["train"]["micro_batch"] == micro_batch
    assert transforms.get("recompute", {}).get("policy") == recompute and transforms.get("shard", {}).get("reduce") == reduce


def test_notes_say_what_a_machine_needs() -> None:
    def notes(**answers: int) -> str:
        return "\n".join(draft(RecipeAnswers("a.toml", DataPath.of("stdlib"), **answers)).notes)

    assert "memory" not in notes(scale=1_300_000_000, gpus=1)
    assert "memory" not in notes(scale=7_000_000_000, gpus=4)
    assert "with 4 GPUs of 80 GB" in notes(scale=7_000_000_000, gpus=2), "as the preset 7b says"
    large = notes(scale=70_000_000_000, gpus=8)
    parameters = draft(RecipeAnswers("a.toml", DataPath.of("stdlib"), scale=70_000_000_000, gpus=8)).parameters
    assert f"take {16 * parameters / 8 / 1e9:.0f} GB of each of 8 GPUs; with 32 GPUs of 80 GB" in large
    hours = Scale.of(10_000_000, 8192).compute / 1e11 / 3600
    assert f"about {hours:.0f} hours of a CPU with 100 GFLOP/s" in notes(scale=10_000_000)
    assert "hours of a CPU" not in notes(scale=10_000_000, tokens=2_000_000)
    assert notes() == ""


def test_the_commands_that_follow_suit_the_machine() -> None:
    assert commands("a.toml", 0) == ("forge-train check a.toml", "forge-train plan a.toml", "forge-train run a.toml")
    assert commands("a b.toml", 8)[2] == "forge-train launch local 'a b.toml' --processes 8"
    assert commands("a.toml", 24)[2] == "forge-train launch slurm a.toml --nodes 3 --gpus-per-node 8"
    assert commands("a.toml", 12)[2].endswith("--nodes 2 --gpus-per-node 6")
    assert commands("a.toml", 24)[0] == "forge-train check a.toml --world 24"


class Person:
    """Answers of a person, one after the other, and the questions that were asked."""

    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def prompt(self, question: str, default: str, err: bool) -> str:
        assert err, "the output stays free for what is written"
        self.asked.append(f"{question} [{default}]")
        answer = self.answers.pop(0)
        return default if answer is None else answer


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Person]:
    """A person at a terminal."""

    def sits(*answers: str | None) -> Person:
        them = Person(*answers)
        monkeypatch.setattr(command, "on_terminal", lambda: True)
        monkeypatch.setattr(typer, "prompt", them.prompt)
        return them

    return sits


def test_five_questions_are_asked_on_a_terminal(say: Say, person: Callable[..., Person], tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    them = person("mine.txt", "bytes", "40m", "2", "600m")
    code, said, _ = say("init", "a.toml")
    assert code == 0 and "wrote a.toml" in said and said.splitlines()[1:] == [f"  {line}" for line in commands("a.toml", 2)]
    assert [question[:3] for question in them.asked] == ["1. ", "2. ", "3. ", "4. ", "5. "]
    assert them.asked[4].endswith("[800M]"), "20 for each parameter"
    job = load_recipe(tmp_path / "a.toml", (), 2).job
    assert (job.data.sources[0].path, job.model.vocab_size) == ("mine.txt", 320)
    assert 0 <= job.train.max_steps * job.train.global_batch * 2048 - 600_000_000 < job.train.global_batch * 2048


def test_a_wrong_answer_is_asked_for_again(say: Say, person: Callable[..., Person], tmp_path: Path) -> None:
    them = person("nowhere", None, "gpt3", None, "9m", None, "two", "0", "much", None)
    code, _, errors = say("init")
    assert code == 0 and len(them.asked) == 10 and not them.answers
    for text in ("nowhere does not exist", "gpt3", "9M", "--gpus two", "'much'"):
        assert text in errors
    say("init", "same.toml", "--yes", "--gpus", "0")
    assert (tmp_path / "same.toml").read_text() == (tmp_path / "recipe.toml").read_text().replace("recipe", "same")


def test_options_answer_questions(say: Say, person: Callable[..., Person], places: dict[str, str]) -> None:
    given = {"--data": "stdlib", "--tokenizer": "bytes", "--scale": "10m", "--gpus": "0", "--tokens": "5m"}
    them = person(None)
    for left in given:
        them.answers, them.asked = [None], []
        options = [word for pair in given.items() if pair[0] != left for word in pair]
        assert say("init", "a.toml", "--force", *options)[0] == 0 and len(them.asked) == 1, left
    them.answers, them.asked = [], []
    for quiet in (["--yes"], ["--json"]):
        assert say("init", "a.toml", "--force", *quiet)[0] == 0
    them.answers, them.asked = ["", "300", None, None, None], []
    code, _, errors = say("init", "a.toml", "--force", "--data", places["megatron"])
    assert code == 0 and "--vocab-size is missing" in errors
    assert "How many token ids" in them.asked[0] and len(them.asked) == 5


def test_a_store_that_records_its_vocabulary_needs_no_number(tmp_path: Path, say: Say) -> None:
    (tmp_path / "text.txt").write_text("text " * 1000)
    prepared = processes.run(
        *("-m", "forge_data", "prepare", "--path", "text.txt", "--out", "corpus", "--tokenizer", "bytes"),
        cwd=tmp_path,
        torch=False,
    )
    assert prepared.returncode == 0, prepared.stderr
    assert say("init", "--data", "corpus")[0] == 0
    assert load_recipe(tmp_path / "recipe.toml", (), 1).job.model.vocab_size == 320
    code, _, errors = say("init", "--force", "--data", "corpus", "--vocab-size", "100")
    assert code == 2 and "--vocab-size 100: corpus has 257 token ids" in errors


def test_gpus_are_counted_as_the_environment_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "null"):
        (tmp_path / "dev" / name).touch()
    for value, number in ((None, 3), ("0,1", 2), ("0,1,2,3", 3), ("", 0), ("-1", 0)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if value is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert command.visible_gpus(tmp_path) == number, value


def test_a_recipe_of_init_trains(tmp_path: Path) -> None:
    """A file of text, bytes, three of its twenty steps."""
    (tmp_path / "mine.txt").write_text("".join(f"sentence number {number}. " for number in range(9000)))
    words = ("init", "mine.toml", "--data", "mine.txt", "--tokenizer", "bytes", "--tokens", "40960", "--gpus", "0")
    assert processes.run("-m", "forge_train", *words, cwd=tmp_path, torch=False).returncode == 0
    done = processes.run("-m", "forge_train", "run", "mine.toml", "--train.stop_at=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/mine/checkpoints/step-00000003").is_dir() and (tmp_path / "runs/mine/report.html").is_file()
