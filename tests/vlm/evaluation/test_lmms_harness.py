"""Tasks of lmms-eval through its own evaluator, on local task files; skipped where the library is not installed."""

import json
import os
import subprocess
import sys
import tomllib
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.errors import ForgeError
from forge_train.cli import main
from harness.pages import ROOT
from harness.pool import World
from vlm.visual_run import QUESTIONS, Oracle, opened, trained

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_visual: !function tools.visual
doc_to_text: !function tools.text
doc_to_target: {target}
{more}
metadata:
  - version: 0.0
"""
TOOLS = """
from PIL import Image
from pathlib import Path
HERE = Path(__file__).parent.parent

def visual(doc):
    return [str(HERE / doc["video"])] if doc.get("video") else [Image.open(HERE / name) for name in doc["images"]]

def text(doc, *_):
    return doc["question"]

def scored(doc, results):
    ((score, greedy),) = results
    return {"perplexity": score, "acc": int(greedy)}

def messages(doc):
    images = [{"type": "image", "url": str(HERE / name)} for name in doc["images"]]
    return [
        {"role": "user", "content": [{"type": "text", "text": "See "}, *images, {"type": "text", "text": doc["question"]}]}
    ]
"""
RIGHT = dict(zip((question["question"] for question in QUESTIONS), ("a dog", "yes", "an owl", "a cat", "an owl"), strict=True))
GREEDY = "generation_kwargs:\n  max_new_tokens: 4\n  temperature: 0\n  top_p: 1.0\n  num_beams: 1\n  do_sample: false\n"
MATCH = "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true\n"
ACC = "metric_list:\n" + "".join(
    f"  - metric: {name}\n    aggregation: mean\n    higher_is_better: true\n" for name in ("acc", "acc_norm")
)
KINDS = {
    "choose": ("multiple_choice", "answer", f"doc_to_choice: !function tools.choices\n{ACC}"),
    "score": (
        "loglikelihood",
        "answer_text",
        # The library's own `process_results` cannot read the one score of such a document.
        "process_results: !function tools.scored\nmetric_list:\n"
        "  - metric: perplexity\n    aggregation: perplexity\n    higher_is_better: false\n"
        "  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n",
    ),
    "write": ("generate_until", "answer_text", f"{GREEDY}{MATCH}"),
    "talk": ("generate_until", "answer_text", f"doc_to_messages: !function tools.messages\n{GREEDY}{MATCH}"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and three tasks about its images."""
    pytest.importorskip("lmms_eval")
    folder = tmp_path_factory.mktemp("lmms")
    trained(folder, "joint_decoder", "square")
    (folder / "tasks").mkdir()
    (folder / "tasks" / "tools.py").write_text(TOOLS + "\n\ndef choices(doc):\n    return doc['choices']\n")
    records = []
    for question in QUESTIONS:
        images = question["image"] if isinstance(question["image"], list) else [question["image"]]
        answer = question["choices"].index(RIGHT[question["question"]])
        record = {"images": images, "question": question["question"], "choices": question["choices"], "answer": answer}
        records.append(record | {"answer_text": question["choices"][answer], "video": ""})
    records[3] |= {"video": "clip"}
    data = folder / "documents.json"
    data.write_text("\n".join(map(json.dumps, records)))
    for name, (kind, target, more) in KINDS.items():
        content = TASK.format(name=f"forge_{name}", data=data, kind=kind, target=target, more=more)
        (folder / "tasks" / f"{name}.yaml").write_text(content)
    return folder


def harness() -> Any:
    from forge_train.inference import lmms_harness

    return lmms_harness


def results(model: Any, place: Path, *names: str) -> Any:
    chosen = [f"forge_{name}" for name in names or KINDS]
    model.answers = getattr(model, "answers", SimpleNamespace(topology=SimpleNamespace(size=1)))
    return harness().lmms_results_of(model, chosen, harness().open_lmms_tasks(chosen, place / "tasks"))


def right(text: str) -> str:
    """The text of the right choice of the question in a text."""
    shown = text.replace("<image>", "")
    return next(answer for question, answer in RIGHT.items() if question.replace("<image>", "") in shown)


def test_a_model_that_is_right_scores_one_and_a_wrong_one_zero(place: Path) -> None:
    """Also where the library takes the smallest value of a choice for the likeliest."""
    oracle = Oracle(right)
    found = results(oracle, place)
    assert found["forge_choose"] == {"acc": 1, "acc_norm": 1}
    assert found["forge_score"] == {"acc": 1, "perplexity": pytest.approx(exp(0.1))}
    assert found["forge_write"] == found["forge_talk"] == {"exact_match": 1}
    assert "<image>What is it?" in oracle.asked and "See <image>What is it?" in oracle.asked
    assert any(text.startswith("0.0s<image>1.0s<image>") for text in oracle.asked), "a directory of frames is a video"
    wrong = results(Oracle(lambda text: {"yes": "no", "a cat": "a dog"}.get(right(text), "a cat")), place)
    assert wrong["forge_write"] == wrong["forge_talk"] == {"exact_match": 0} and wrong["forge_choose"]["acc"] == 0
    assert wrong["forge_score"] == {"acc": 0, "perplexity": pytest.approx(exp(3))}


def test_scores_are_those_of_our_own_requests(place: Path) -> None:
    """The likeliest of the log-likelihoods that the model gives is the library's choice."""
    model = opened(place / "run", batch=2)
    spied: list[list[float]] = []
    whole = model.likelihoods

    def likelihoods(requests: Any) -> Any:
        found = whole(requests)
        spied.append([value for value, _ in found])
        return found

    model.likelihoods = likelihoods  # type: ignore[method-assign]
    accuracy = results(model, place, "choose")["forge_choose"]["acc"]
    (values,) = spied
    assert all(value < 0 for value in values)
    hits = []
    for question in QUESTIONS:
        own, values = values[: len(question["choices"])], values[len(question["choices"]) :]
        text = right(question["question"])
        hits.append(question["choices"][own.index(max(own))] == text)
    assert accuracy == pytest.approx(sum(hits) / len(hits))


def test_the_command_and_the_librarys_own_command_agree(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one finds the model by the entry point of the wheel."""
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(place / "run"), "--lmms", "forge_choose,forge_talk", "--folder", str(place / "tasks"), "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)["tasks"]
    assert set(found["forge_choose"]) == {"acc", "acc_norm"}
    points = tomllib.loads((ROOT / "apps/forge-train/pyproject.toml").read_text())["project"]["entry-points"]
    installed = tmp_path / "wheel" / "own-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[lmms_eval.models]\nforge = {points['lmms_eval.models']['forge']}\n")
    path = os.pathsep.join([str(tmp_path / "wheel"), *sys.path])
    arguments = ["--model", "forge", "--model_args", f"checkpoint={place / 'run'}", "--tasks", "forge_talk", "--batch_size", "2"]
    arguments += ["--include_path", str(place / "tasks"), "--output_path", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "lmms_eval", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    (written,) = (tmp_path / "out").rglob("*_results.json")
    theirs = json.loads(written.read_text())["results"]["forge_talk"]
    assert theirs["exact_match,none"] == found["forge_talk"]["exact_match"], done.stderr[-2000:]


def test_what_a_task_cannot_ask_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = harness()._settings
    options = {"until": ["\n"], "temperature": 0, "top_p": 0, "num_beams": 1, "image_aspect_ratio": "pad", "max_new_tokens": 7}
    greedy = settings(options)
    assert (greedy.until, greedy.tokens, greedy.sampling.temperature, greedy.sampling.top_p) == (("\n",), 7, 0, None)
    assert settings({"do_sample": True, "temperature": 0.5, "top_p": 0.9}).sampling.temperature == 0.5
    for refused, why in (
        (lambda: settings({"num_beams": 4}), "a task sets num_beams"),
        (lambda: harness().open_lmms_tasks(["forge_chose"], place / "tasks"), "'forge_chose' is neither in lmms-eval"),
        (lambda: harness().open_lmms_tasks(["forge_choose"], place / "absent"), "does not exist"),
        (lambda: harness().LmmsModel.create_from_arg_string("checkpiont=a"), "unknown arguments checkpiont"),
        (lambda: harness().LmmsModel.create_from_arg_string(""), "no checkpoint"),
        (lambda: harness().LmmsModel(Oracle(right)).generate_until_multi_round([]), "several rounds"),
        (
            lambda: harness().LmmsModel(Oracle(right))._turns([{"role": "user", "content": [{"type": "audio", "url": "a.wav"}]}]),
            "shows audio",
        ),
    ):
        with pytest.raises(ForgeError, match=why):
            refused()
    (place / "tasks" / "gone.yaml").write_text(
        TASK.format(name="forge_gone", data=place / "gone.json", kind="generate_until", target="answer_text", more=GREEDY)
    )
    with pytest.raises(ForgeError, match=r"the data of task .forge_gone. cannot be loaded: .*gone\.json"):
        results(Oracle(right), place, "gone")
    (place / "tasks" / "gone.yaml").unlink()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ForgeError, match="torchrun with forge-train evaluate"):
        harness().LmmsModel.create_from_arg_string("checkpoint=a")


def evaluated(place: Path, size: int) -> Any:
    """On this rank: the results of all tasks."""
    return results(opened(place / "run", (), size, batch=2), place)


def test_two_processes_have_the_numbers_of_one(world: World, place: Path) -> None:
    """The library, which sees RANK and WORLD_SIZE, gives each rank all questions."""
    alone = evaluated(place, 1)
    assert {"acc", "acc_norm"} == set(alone["forge_choose"])
    for found in world.run(evaluated, 2, place, 2, timeout=300):
        assert found == {name: pytest.approx(metrics) for name, metrics in alone.items()}
