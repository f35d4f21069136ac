"""Tasks of the LM Evaluation Harness: every likelihood and text as from its model of transformers, in any layout."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_train.cli import main
from forge_train.hooks import evaluation
from forge_train.inference.answers import GenerationSettings
from forge_train.inference.harness import HarnessModel, open_tasks, results_of
from forge_train.inference.stored import load_sharded_model, open_weights, recipe_to_generate
from forge_train.inference.tasks import generators_kept
from forge_train.inference.tokenizer import tokenizer_for
from forge_train.run.loop import fit
from harness.pool import World
from harness.siblings import fast
from train.runs import TINY, prepared, train

LENGTH, END = 32, "<|end|>"
TEXT = Path(random.__file__).read_text()
QUESTIONS = [
    {"question": f"def area{index}(x):\n    return", "choices": [" x + 1", " None\n", " yield x", " x"], "answer": index % 4}
    for index in range(7)
] + [{"question": TEXT[:400], "choices": [" a", " bb", " c", " d"], "answer": 2}]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
{more}
"""
KINDS = {
    "choose": (
        "multiple_choice",
        "doc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\n"
        "metric_list:\n  - metric: acc\n  - metric: acc_norm",
    ),
    "whole": (
        "loglikelihood_rolling",
        "doc_to_text: ''\ndoc_to_target: '{{question}}'\nmetric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte",
    ),
    "write": (
        "generate_until",
        "doc_to_text: '{{question}}'\ndoc_to_target: ' x'\n"
        "generation_kwargs:\n  until: ['\\n\\n']\n  max_gen_toks: 6\n  do_sample: false\nmetric_list:\n  - metric: exact_match",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers with a tokenizer, and three kinds of tasks about it."""
    place = tmp_path_factory.mktemp("asked")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, special_tokens=["<|first|>", END], initial_alphabet=alphabet)
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, model_max_length=LENGTH)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        eos_token_id=wrapped.eos_token_id,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(place / "model")
    wrapped.save_pretrained(place / "model")
    (place / "tasks").mkdir()
    data = place / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, (kind, more) in KINDS.items():
        (place / "tasks" / f"{name}.yaml").write_text(TASK.format(name=f"forge_{name}", data=data, kind=kind, more=more))
    return place


def ours(folder: Path, overrides: list[str], size: int, batch: int = 3) -> HarnessModel:
    registry = Registry()
    weights = open_weights(folder / "model", registry)
    model = load_sharded_model(weights, recipe_to_generate(weights, overrides, size, registry), torch.device("cpu"), registry)
    return HarnessModel(model, tokenizer_for(weights, None, registry, lambda _: None), batch=batch)


def theirs(folder: Path) -> HFLM:
    place = str(folder / "model")
    return HFLM(pretrained=place, tokenizer=place, device="cpu", dtype="float32", batch_size=1, max_length=LENGTH)


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    """As the harness makes them."""
    return [SimpleNamespace(args=given, request_type="loglikelihood") for given in arguments]


PAIRS = [(entry["question"], choice) for entry in QUESTIONS for choice in entry["choices"]]
PAIRS += [("", "def"), ("a ", "b"), (TEXT[:90], "\n")]
ROLLING = [(TEXT[at : at + length],) for at, length in ((0, 5), (100, 60), (300, 900))]
UNTIL = [
    (entry["question"], {"until": ["x"], "max_gen_toks": 5 + index % 2, "do_sample": False})
    for index, entry in enumerate(QUESTIONS)
]


def answers(model: Any) -> tuple[list[tuple[float, bool]], list[float], list[str]]:
    """To all three kinds of questions."""
    likelihoods = model.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    return likelihoods, model.loglikelihood_rolling(requests(*ROLLING), disable_tqdm=True), model.generate_until(requests(*UNTIL))


def same(found: Any, expected: Any) -> None:
    (mine, mine_rolling, mine_texts), (their, their_rolling, their_texts) = found, expected
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in their]
    assert [value for value, _ in mine] == pytest.approx([value for value, _ in their], rel=2e-5)
    assert mine_rolling == pytest.approx(their_rolling, rel=2e-5)
    assert mine_texts == their_texts


def test_every_answer_is_that_of_transformers(folder: Path) -> None:
    expected = answers(theirs(folder))
    assert len(set(expected[2])) > 3 and any("x" not in text for text in expected[2])
    same(answers(ours(folder, [], 1)), expected)


def asked(folder: Path, overrides: list[str], size: int) -> Any:
    """On this rank: answers, and the results of tasks."""
    model = ours(folder, overrides, size)
    names = [f"forge_{name}" for name in KINDS]
    return answers(model), results_of(model, names, open_tasks(names, folder / "tasks"), shots=1)


LAYOUTS = {
    "dp2": [],
    "tp2": ["--parallel.tp=2"],
    "pp2": ["--parallel.pp=2"],
    "cp2": ["--parallel.cp=2"],
    "dp2tp2": ["--parallel.tp=2"],
}


@pytest.mark.parametrize("layout", fast("dp2", of=LAYOUTS))
def test_a_layout_answers_like_one_process(world: World, folder: Path, layout: str) -> None:
    size = 4 if layout == "dp2tp2" else 2
    alone, results = asked(folder, [], 1)
    for found, others in world.run(asked, size, folder, LAYOUTS[layout], size):
        same(found, alone)
        assert others == {name: pytest.approx(metrics, rel=1e-5) for name, metrics in results.items()}


def test_the_command_prints_what_the_harness_finds_for_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"forge_{name}" for name in KINDS]
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(folder / "model"), "--tasks", ",".join(names), "--folder", str(folder / "tasks"), "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)["tasks"]
    index = open_tasks(names, folder / "tasks")
    their = simple_evaluate(theirs(folder), tasks=names, task_manager=index, bootstrap_iters=0)["results"]  # type: ignore[index]
    assert {name: sorted(metrics) for name, metrics in found.items()} == {
        "forge_choose": ["acc", "acc_norm"],
        "forge_whole": ["bits_per_byte", "word_perplexity"],
        "forge_write": ["exact_match"],
    }
    for name, metrics in found.items():
        assert metrics == pytest.approx({metric: their[name][f"{metric},none"] for metric in metrics}, rel=1e-4)


def test_generators_are_as_before(folder: Path) -> None:
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    results_of(ours(folder, [], 1), ["forge_choose"], open_tasks(["forge_choose"], folder / "tasks"))
    drawn = random.random(), numpy.random.rand(), torch.rand(()).item()
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    assert drawn == (random.random(), numpy.random.rand(), torch.rand(()).item())


def test_no_program_lists_the_packages_and_drivers_of_the_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a training would wait for it at each evaluation."""
    asked: list[str] = []
    monkeypatch.setattr("torch.utils.collect_env.run", lambda command: asked.append(command) or (1, "", ""))
    with generators_kept():
        simple_evaluate(theirs(folder), tasks=["forge_choose"], task_manager=open_tasks(["forge_choose"], folder / "tasks"))
    assert asked, "the harness by itself does"
    asked.clear()
    results_of(ours(folder, [], 1), ["forge_choose"], open_tasks(["forge_choose"], folder / "tasks"))
    assert not asked


def test_what_cannot_be_asked_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ForgeError, match="does not exist"):
        open_tasks(["forge_choose"], folder / "absent")
    model = ours(folder, [], 1)
    with pytest.raises(ForgeError, match="supports 1 to max_length = 32"):
        model.loglikelihood(requests(("a", TEXT[:400])), disable_tqdm=True)
    with pytest.raises(ForgeError, match="a task sets num_beams"):
        model.generate_until(requests(("a", {"until": [], "num_beams": 4})))
    with pytest.raises(ForgeError, match="needs 32 new tokens"):
        model.generate_until(requests(("a", {"max_gen_toks": 32})))
    sampled = GenerationSettings.of({"temperature": 0.7, "top_p": 0.9, "until": "\n"})
    assert (sampled.until, sampled.sampling.temperature, sampled.sampling.top_p) == (("\n",), 0.7, 0.9)
    assert GenerationSettings.of({"do_sample": False, "temperature": 0.7}).sampling.temperature == 0


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--shots", "2"], "--shots has no effect without --tasks"),
        (["--batch", "2", "--tokenizer", "a"], "--batch, --tokenizer has no effect without --tasks"),
        (["--tasks", ","], "--tasks names no task"),
        (["--tasks", "forge_choose", "--recipe", "debug"], "--recipe (held-out sets) and --tasks"),
    ],
)
def test_an_option_without_a_part_in_the_evaluation_is_refused(
    folder: Path, given: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(folder / "model"), *given])
    assert ended.value.code == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_a_run_that_is_asked_to_stop_leaves_the_questions_and_the_next_start_asks_them(folder: Path, tmp_path: Path) -> None:
    written, given = recipe(folder, tmp_path)
    run, _ = prepared(
        written,
        [
            *given[1:],
            f"--job.dir={tmp_path / 'run'}",
            f'--hooks=[{{name="tasks",tasks=["forge_choose"],folder="{folder / "tasks"}",every=2}}]',
        ],
    )
    (hook,) = [hook for hook in run.hooks if isinstance(hook, evaluation.Tasks)]
    made = hook.leaves

    def asked_meanwhile(*arguments: Any) -> bool:
        run.stop.asked = True
        return made(*arguments)

    hook.leaves = asked_meanwhile  # type: ignore[method-assign]
    fit(run)
    assert run.state.step == 2 and hook.left and dict(hook.state()) == {"left": True}
    assert not any(name.startswith("tasks/") for name in run.results)


@pytest.mark.slow
def test_a_misspelled_task_of_the_harness_is_told_what_is_near() -> None:
    with pytest.raises(ForgeError, match=r"task 'hellaswga' is neither.*hellaswag"):
        open_tasks(["hellaswga"], None)


def recipe(folder: Path, place: Path) -> tuple[Path, list[str]]:
    """A run on bytes of ids that asks a task, and what it is called with."""
    written = place / "asks.toml"
    written.write_text(TINY.replace("vocab_size = 61", "vocab_size = 257") + '\n[data.tokenizer]\nname = "bytes"\n')
    task = f'name="tasks",tasks=["forge_choose"],folder="{folder / "tasks"}",every=2,limit=3'
    return written, [f'--hooks=[{{name="ema",decay=0.5}},{{{task}}},{{{task},weights="ema"}}]', "--train.max_steps=3"]


def test_a_run_asks_and_trains_as_without(world: World, folder: Path, tmp_path: Path) -> None:
    written, given = recipe(folder, tmp_path)
    plain = world.run(train, 2, written, ["--hooks=[]", "--train.max_steps=3", f"--job.dir={tmp_path / 'plain'}"])
    found = world.run(train, 2, written, [*given, f"--job.dir={tmp_path / 'asks'}"])
    assert [rank["weights"] for rank in found] == [rank["weights"] for rank in plain]
    lines = [json.loads(line) for line in (tmp_path / "asks" / "metrics.jsonl").read_text().splitlines()]
    asked_at = [line["step"] for line in lines if "tasks/forge_choose/acc" in line]
    assert asked_at == [line["step"] for line in lines if "tasks/forge_choose@ema/acc_norm" in line] == [2, 3]


def test_a_run_that_could_not_ask_does_not_start(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, given = recipe(folder, tmp_path)
    given = [*given, f"--job.dir={tmp_path / 'run'}"]
    with pytest.raises(ForgeError, match="needs a tokenizer"):
        train(written, [*given, '--data.tokenizer="none"'])
    with pytest.raises(ForgeError, match="does not exist"):
        train(written, [argument.replace("/tasks", "/absent") for argument in given])
    monkeypatch.setattr(evaluation, "importlib", SimpleNamespace(import_module=_absent))
    with pytest.raises(ForgeError, match=r'pip install "forge-train\[eval\]"'):
        train(written, given)


def _absent(name: str) -> None:
    raise ModuleNotFoundError(name, name="lm_eval")


def test_trials_a10_a_rolling_likelihood_has_the_tokenizers_own_first_token_once(folder: Path, tmp_path: Path) -> None:
    """Against log-probabilities by transformers: the first token is read, before the first text, and is not predicted."""
    shutil.copytree(folder / "model", tmp_path / "model")
    backend = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    first = backend.token_to_id("<|first|>")
    backend.post_processor = processors.TemplateProcessing(single="<|first|> $A", special_tokens=[("<|first|>", first)])
    backend.save(str(tmp_path / "model" / "tokenizer.json"))
    reference = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    text = TEXT[:40]
    ids = backend.encode(text).ids
    assert ids[0] == first and ids.count(first) == 1
    with torch.no_grad():
        steps = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    each = steps[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
    model = ours(tmp_path, [], 1)
    assert model.prefix_token_id == first
    assert model.loglikelihood_rolling(requests((text,)))[0] == pytest.approx(sum(each), rel=1e-5)
    pieces = {at: backend.encode(text[:at]).ids for at in range(8, 30) if not text[at - 1].isspace()}
    at, half = next((at, len(found)) for at, found in pieces.items() if found == ids[: len(found)])
    (pair, alone) = model.loglikelihood(requests((text[:at], text[at:]), ("", text)), disable_tqdm=True)
    assert pair[0] == pytest.approx(sum(each[half - 1 :]), rel=1e-5) and alone[0] == pytest.approx(sum(each), rel=1e-5)
