"""What would fail in a hook at the end of a run, and can be known before it begins, is refused there."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forge_core.errors import ConfigError, DataError, ForgeError
from forge_core.registry import Registry
from forge_data.loading import evaluation
from forge_data.loading.evaluation import Question
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_train.hooks.evaluation import Evaluate, Tasks
from forge_train.hooks.samples import Answers, Sample
from forge_train.recipe.load import load_recipe
from train.runs import TINY

BYTES = TINY.replace("vocab_size = 61", "vocab_size = 257") + '\n[data.tokenizer]\nname = "bytes"\n'


def run_of(length: int, **more: Any) -> Any:
    model = SimpleNamespace(max_length=length)
    held: dict[str, Any] = {"data": SimpleNamespace(tokenizer=ByteTokenizer()), "evaluations": {}}
    return SimpleNamespace(
        job=SimpleNamespace(model=model), **{"model": SimpleNamespace(parts=[SimpleNamespace(shape=None)]), **held, **more}
    )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            'prompts = ["short", "a prompt of 22 bytes :)"]',
            r"hooks\.1\.prompts\.1: 23 tokens and .*max_tokens = 10 new",
        ),
        ('prompts = ["def ", ""]', r"hooks\.1\.prompts\.1: is empty"),
    ],
)
def test_trials_c1_prompts_that_cannot_be_continued_are_refused_by_check(keys: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(BYTES + f'\n[[hooks]]\nname = "sample"\nmax_tokens = 10\n{keys}\n')
    with pytest.raises(ConfigError, match=said):
        load_recipe(tmp_path / "tiny.toml", [], 1, Registry())


def test_prompts_whose_length_only_the_tokenizer_knows_are_refused_at_the_start() -> None:
    Sample(prompts=["x" * 22], max_tokens=10).check(run_of(32))
    with pytest.raises(ForgeError, match=r"hook 'sample': prompt 1 with 23 tokens and .* exceed the model's limit of 32"):
        Sample(prompts=["a", "x" * 23], max_tokens=10).check(run_of(32))
    with pytest.raises(ForgeError, match="hook 'sample': prompt 0 is empty"):
        Sample(prompts=[""], max_tokens=10).check(run_of(32))
    with pytest.raises(ForgeError, match=r"hook 'sample': object does not generate text, .*; remove the hook"):
        Sample().check(run_of(32, model=SimpleNamespace(parts=[object()])))


def asked(*sizes: tuple[int, int]) -> list[Question]:
    return [Question(np.zeros(given, int), np.ones(answer, int), (0, 0)) for given, answer in sizes]


def hook_of(max_tokens: int = 256) -> Answers:
    return Answers(max_tokens=max_tokens)


def test_trials_c1_questions_are_asked_in_portions_that_fit_the_model() -> None:
    """A long prompt and another question's long answer do not fit 64 together; each alone does, so both are asked."""
    every = asked((50, 14), (10, 29), (35, 29), *[(4, 2)] * 40, (64 - 3, 3))
    parts = list(hook_of()._together(run_of(64), every))
    assert [question for part in parts for question in part] == every
    for part in parts:
        assert len(part) <= 32
        assert max(len(each.prompt) for each in part) + max(len(each.answer) for each in part) <= 64
    assert [len(part) for part in parts] == [1, 32, 11]
    assert [len(part) for part in hook_of()._together(run_of(10**6), asked(*[(9, 9)] * 70))] == [32, 32, 6], "as before"


def test_an_answer_that_no_model_of_this_length_can_give_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = {"pairs": SimpleNamespace(source=object())}
    monkeypatch.setattr(evaluation, "inputs_of", lambda source, part: {})
    for sizes, max_tokens, fits in (((40, 24), 256, True), ((40, 25), 256, False), ((40, 25), 24, True)):
        monkeypatch.setattr(evaluation, "questions", lambda source, count, sizes=sizes: iter(asked(sizes)))
        hook, run = hook_of(max_tokens), run_of(64, evaluations=held_out)
        if fits:
            hook.check(run)
            continue
        with pytest.raises(ForgeError, match=r"hook 'answers': .* 'pairs' has a prompt of 40 tokens and an answer of 25"):
            hook.check(run)


def test_a_held_out_image_that_is_gone_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(source: Any, part: Any) -> Any:
        raise DataError("cat.png is missing")

    monkeypatch.setattr(evaluation, "questions", lambda source, count: iter(asked((4, 2))))
    monkeypatch.setattr(evaluation, "inputs_of", gone)
    with pytest.raises(ForgeError, match=r"hook 'answers': held-out set 'pets': cat\.png is missing"):
        hook_of().check(run_of(64, evaluations={"pets": SimpleNamespace(source=object())}))


@pytest.mark.parametrize("asked_as", ["mine", "several", "tagged"])
@pytest.mark.parametrize(("kwargs", "tokens"), [("until: ['\\n']", 256), ("max_gen_toks: 64", 64), ("max_gen_toks: 63", 63)])
def test_trials_c1_tasks_that_generate_more_than_the_model_takes_are_refused(
    asked_as: str, kwargs: str, tokens: int, tmp_path: Path
) -> None:
    """Also in a group or under a tag; nothing of the task's data is read."""
    pytest.importorskip("lm_eval")
    more = "doc_to_text: '{{q}}'\ndoc_to_target: x\ntag: tagged\ntest_split: test\ndataset_path: json\n"
    (tmp_path / "mine.yaml").write_text(f"task: mine\noutput_type: generate_until\n{more}generation_kwargs: {{{kwargs}}}\n")
    (tmp_path / "other.yaml").write_text(f"task: other\noutput_type: generate_until\n{more}")
    (tmp_path / "several.yaml").write_text("group: several\ntask: [mine]\n")
    hook = Tasks(tasks=[asked_as], folder=str(tmp_path))
    if asked_as == "tagged" and tokens < 64:  # the other task of the tag asks for 256
        with pytest.raises(ForgeError, match="task 'other' needs 256"):
            hook.check(run_of(64))
        return
    if tokens < 64:
        hook.check(run_of(64))
        return
    with pytest.raises(ForgeError, match=r"hook 'tasks': task '\w+' needs \d+ new tokens, but the model supports 64"):
        hook.check(run_of(64))


def test_every_image_of_an_evaluated_set_is_looked_for_at_the_start(tmp_path: Path) -> None:
    """A store that is there already is not prepared again, so nothing else would look at them before step `every`."""
    pytest.importorskip("forge_vlm")
    from PIL import Image

    from forge_core.protocols.data import SourceContext
    from forge_vlm.components.sources import ImageJsonl

    lines = [{"text": f"number {number}", "image": f"{number}.png"} for number in range(14)]
    for line in lines:
        Image.new("RGB", (8, 8), (len(line["text"]), 0, 0)).save(tmp_path / line["image"])
    (tmp_path / "records.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    component = ImageJsonl(path=str(tmp_path / "records.jsonl"), placeholder=300, per_image=2, size=8, skip=14)

    def checked(at: Path) -> None:
        source = component.build(SourceContext(at, ByteTokenizer(), 64, lambda _: None))
        Evaluate().check(run_of(64, evaluations={"words": SimpleNamespace(), "pets": SimpleNamespace(source=source)}))

    checked(tmp_path / "w")
    (tmp_path / "3.png").unlink()
    with pytest.raises(DataError, match=r"'evaluate': held-out set 'pets' has 1 missing images: 3\.png; restore .*image_jsonl-"):
        checked(tmp_path / "w")
    for number in range(12):
        (tmp_path / f"{number}.png").unlink(missing_ok=True)
    with pytest.raises(DataError, match=r"has 12 missing images: 0\.png, .* 9\.png and 2 others; restore them, or remove "):
        checked(tmp_path / "w")
    checked(tmp_path / "anew")
