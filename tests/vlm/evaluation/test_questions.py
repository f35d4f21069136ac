"""Questions about images put to a model: it reads what training makes of the same conversation, and the scores are its own."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from forge_core.errors import DataError, ForgeError
from forge_core.registry import Registry
from forge_data.chat.conversation import TEMPLATES, Chat, Turn
from forge_data.loading.stream import open_stream
from forge_data.section import Data
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_models.generation import Sampling
from forge_train.cli import main
from forge_train.formats.forge import job_of
from forge_train.inference.answers import AnswerModel, GenerationSettings
from forge_train.inference.questions import evaluate_questions, open_questions
from forge_train.inference.stored import load_model, open_weights
from forge_train.inference.visual_answers import VisualAnswerModel, VisualRequest
from forge_vlm.data.documents import BrokenRecord
from forge_vlm.data.inputs import ImageInputs
from forge_vlm.data.question_prompts import Clips, QuestionEncoder, clip_settings, file_of
from forge_vlm.evaluation.visual_questions import INSTRUCTION
from forge_vlm.images.pixels import Processing, convert, decode
from forge_vlm.images.tiling import Tiling
from harness.pool import World
from harness.siblings import fast
from train.runs import TINY, train
from vlm.visual_run import OPEN, QUESTIONS, Oracle, lines, opened, trained

PLACEHOLDER = 299


FUSIONS = [("joint_decoder", "anyres"), pytest.param(("cross_attention", "square"), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=FUSIONS, ids=["joint_decoder", "cross_attention"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of questions, and a run with a chat template that learned from conversations."""
    folder = tmp_path_factory.mktemp("asked")
    trained(folder, *request.param)
    return folder


@pytest.fixture(scope="module")
def model(place: Path) -> VisualAnswerModel:
    """The run's model on one process, in batches of 3 rows."""
    return opened(place / "run", batch=3)


def asked(question: dict[str, Any]) -> str:
    """The text that the user says, written down a second time."""
    lines = [f"{letter}. {choice}" for letter, choice in zip("ABC", question["choices"], strict=False)]
    return "\n".join([question["question"], *lines, INSTRUCTION])


def training_batch(run: Path, record: dict[str, Any], folder: Path) -> Any:
    """What the run's own loader makes of one conversation."""
    weights = open_weights(run, Registry())
    data: Data = job_of(weights.meta, Registry(), "data", "job").data
    path = lines(folder / "one.jsonl", [record])
    source = type(data.sources[0])(
        path=str(path), template=data.sources[0].template, tiling=data.sources[0].tiling, folder=str(folder)
    )
    chosen = Data(sources=[source], tokenizer=data.tokenizer, sequence_length=320, packing="pad", shuffle="none", epochs=1)
    stream = open_stream(chosen, workspace=folder / "work", global_batch=1, micro_batch=1, seed=0, model=weights.model)
    ((batch, *_),) = [found for found, _ in islice(stream.from_cursor(stream.start()), 1)]
    return batch


def conversation(question: dict[str, Any], answer: str) -> dict[str, Any]:
    """A training record; without markers all images precede the text, as in a question."""
    named = question["image"] if isinstance(question["image"], list) else [question["image"]]
    said = asked(question) if "<image>" in question["question"] else "<image>" * len(named) + asked(question)
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "image": named}


def test_a_log_likelihood_is_that_of_one_forward_over_a_training_row(place: Path, model: VisualAnswerModel) -> None:
    """Of the answer and the end of its turn, for each choice: labels and logits of training, summed here."""
    results = evaluate_questions(model, open_questions(place / "choices.jsonl", metrics=["likelihood"]))
    whole = load_model(open_weights(place / "run", Registry())).eval()
    for question, row in zip(QUESTIONS[1:3], results.rows[1:], strict=False):
        for letter, found in row["likelihoods"].items():
            batch = training_batch(place / "run", conversation(question, letter), place)
            # The end of the document is learned too, but is no part of an answer.
            labels = batch.labels[0].clone()
            labels[(labels >= 0).nonzero()[-1]] = -100
            with torch.no_grad():
                steps = whole(batch.tokens, **batch.extras)[0].log_softmax(-1)
            here = labels >= 0
            expected = float(steps[here].gather(1, labels[here][:, None]).sum())
            assert found == pytest.approx(expected, rel=1e-5)
            told = bytes(labels[here].tolist()).decode()
            assert told.rstrip("\n") == f"{letter}<|im_end|>"
    assert len({value for row in results.rows for value in row["likelihoods"].values()}) == sum(
        len(q["choices"]) for q in QUESTIONS
    )


def test_the_letter_with_the_largest_likelihood_counts(place: Path, model: VisualAnswerModel) -> None:
    results = evaluate_questions(model, open_questions(place / "choices.jsonl", metrics=["likelihood"]))
    right = []
    for question, row in zip("BACAC", results.rows, strict=True):
        likelihoods = row["likelihoods"]
        right.append(float(likelihoods[question] == max(likelihoods.values())))
    assert [row["likelihood"] for row in results.rows] == right
    assert results.metrics["likelihood"] == sum(right) / 5 and results.metrics["n"] == 5


def greedy(model: Any, ids: list[int], inputs: Any, count: int) -> list[int]:
    """By whole forwards, without a cache."""
    new: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *new]]), **inputs)[0, -1]
        logits[PLACEHOLDER] = -torch.inf
        new.append(int(logits.argmax()))
    return new


def test_a_written_answer_is_greedy_after_the_prompt_of_training(place: Path, model: VisualAnswerModel) -> None:
    """In batches with other questions, of other lengths and numbers of images."""
    found = evaluate_questions(
        opened(place / "run", batch=3), open_questions(place / "choices.jsonl", metrics=["letter"]), tokens=5
    )
    whole = load_model(open_weights(place / "run", Registry())).eval()
    for question, row in zip(QUESTIONS[:2], found.rows, strict=False):
        batch = training_batch(place / "run", conversation(question, "A"), place)
        size = int((batch.labels[0] >= 0).nonzero()[0]) + 1
        new = greedy(whole, batch.tokens[0, :size].tolist(), batch.extras, 5)
        text = bytes(token for token in new[: new.index(256) if 256 in new else 5] if token < 256).decode(errors="replace")
        assert row["written"] == text.split("<|im_end|>")[0]


def test_right_answers_score_one_and_wrong_ones_zero(place: Path) -> None:
    answers = {"What is it?": "B", "Is <image> like <image>?": "A", "Which <|im_end|>?": "C", "And this?": "A", "And that?": "C"}

    def right(text: str) -> str:
        return next(letter for question, letter in answers.items() if question in text)

    def wrong(text: str) -> str:
        return {"A": "B", "B": "A", "C": "A"}[right(text)]

    file = open_questions(place / "choices.jsonl")
    for says, value in ((right, 1.0), (wrong, 0.0)):
        oracle = Oracle(says)
        found = evaluate_questions(oracle, file)  # type: ignore[arg-type]
        assert found.metrics == {
            "n": 5,
            "letter": value,
            "letter_stderr": 0.0,
            "likelihood": value,
            "likelihood_stderr": 0.0,
            "unreadable": 0,
        }
        assert [text.replace("<image>", "") for text in dict.fromkeys(oracle.asked)] == [
            asked(question).replace("<image>", "") for question in QUESTIONS
        ]
        assert all(text.count("<image>") == (2 if "like" in text else 1) for text in oracle.asked)
    silent = evaluate_questions(Oracle(lambda _: "Hm."), file)  # type: ignore[arg-type]
    assert silent.metrics["unreadable"] == 5 and silent.metrics["letter"] == 0


def test_open_answers_have_each_metric(place: Path) -> None:
    metrics = ["exact_match", "anls", "relaxed_accuracy"]
    file = open_questions(place / "open.jsonl", metrics=metrics)
    oracle = Oracle(lambda text: " The cat.\n" if "What is" in text else "3.1" if "many" in text else "nothin")
    found = evaluate_questions(oracle, file, "Be brief.")  # type: ignore[arg-type]
    assert oracle.asked[0] == "<image>What is it?\nBe brief."
    assert oracle.asked[2] == "0.0s<image>1.0s<image>2.0s<image>3.0s<image>What happens?\nBe brief."
    values = [[row[name] for row in found.rows] for name in metrics]
    assert values[0] == [1, 0, 0] and values[2] == [0, 1, 0]
    # "the cat." to "a cat": 3 letters replaced or inserted and one removed of 8; "3.1" to "3": one of three, below half.
    assert values[1] == pytest.approx([1 - 4 / 8, 0, 1 - 1 / 7])
    assert found.metrics["anls"] == pytest.approx((0.5 + 6 / 7) / 3)


def test_a_clip_has_as_many_frames_as_the_model_shows(place: Path, model: VisualAnswerModel) -> None:
    oracle = Oracle(lambda _: "nothing")
    oracle.frames, oracle.told = 2, False
    evaluate_questions(oracle, open_questions(place / "open.jsonl"))  # type: ignore[arg-type]
    assert oracle.asked[2] == "<image><image>What happens?" and model.frames == 8
    assert opened(place / "run", frames=3).frames == 3


def test_a_model_with_times_of_frames_gets_those_of_the_clip() -> None:
    """And of an image beside it, that it is no frame; also where several questions are one batch."""
    from forge_train.inference.answers import _together

    half = (0.5,) * 3
    inputs = ImageInputs(300, 4, Processing(size=8, mean=half, std=half), 3, Tiling(), timed=True)
    encoder = QuestionEncoder(ByteTokenizer(), Chat(TEMPLATES["plain"]), inputs)
    frames = [{"type": "image", "path": "frame", "seconds": seconds} for seconds in (0, 2.5)]
    turns = [Turn("user", [*frames, {"type": "image", "path": "photo"}, {"type": "text", "text": "what happens?"}])]
    given = encoder.prompt(turns, lambda name: file_of(Image.new("RGB", (8, 8))) or b"").inputs
    assert given["image_times"].tolist() == [0.0, 2.5, -1.0]
    both = _together([given, {}, given])
    assert both["image_times"].tolist() == [0.0, 2.5, -1.0] * 2
    assert both["image_rows"].tolist() == [[0, 1, 2], [-1, -1, -1], [3, 4, 5]]
    for wrong in ("late", True, -1, float("nan"), float("inf")):
        with pytest.raises(BrokenRecord, match=f"an image at seconds {wrong!r} in"):
            encoder.prompt([Turn("user", [frames[0] | {"seconds": wrong}])], lambda name: b"")


def text_request(text: str) -> VisualRequest:
    return VisualRequest("here", lambda: ([Turn("user", text)], {}.__getitem__))


def test_an_answer_ends_where_the_turn_or_the_model_does(model: VisualAnswerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GenerationSettings((), 6, Sampling())
    # "<|im_start|>user\n" + text + "<|im_end|>\n<|im_start|>assistant\n" leaves 4 of 512 tokens.
    long = "a" * (512 - 4 - 17 - 11 - 22)
    (alone,) = model.texts([text_request(long)], replace(whole, tokens=4))
    beside = model.texts([text_request("b"), text_request(long), text_request("c")], whole)
    assert beside[1] == alone and beside[::2] == [model.texts([text_request(text)], whole)[0] for text in "bc"]
    with pytest.raises(ForgeError, match="leaves no room"):
        model.texts([text_request(long + "aaaa")], whole)
    asked: list[GenerationSettings] = []
    monkeypatch.setattr(AnswerModel, "texts", lambda _, items, prompt, settings: asked.append(settings))
    model.texts([], replace(whole, until=("stop",)))
    assert asked[0].until == ("stop", "<|im_end|>") and model.answers.ends == {256}


def test_the_end_of_a_turn_is_what_the_template_writes() -> None:
    def end(template: str, coder: Any = None) -> tuple[str, int | None]:
        encoder = QuestionEncoder(coder or ByteTokenizer(), Chat(template), None)  # type: ignore[arg-type]
        return encoder.end_text, encoder.end_id

    assert end(TEMPLATES["plain"]) == ("\n", 10)
    assert end(TEMPLATES["chatml"]) == ("<|im_end|>", None)
    assert end("{% for m in messages %}{{ m.content }}{% endfor %}") == ("", None)
    one_token = SimpleNamespace(encode_pieces=lambda pieces: (np.array([7]), None))
    assert end(TEMPLATES["chatml"], one_token) == ("<|im_end|>", 7)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "CMYK"])
def test_a_decoded_image_becomes_a_file_without_loss(mode: str) -> None:
    draw = torch.Generator().manual_seed(2)
    image = Image.fromarray(torch.randint(0, 256, (5, 6, 3), generator=draw, dtype=torch.uint8).numpy()).convert(mode)
    content = file_of(image)
    assert content is not None and file_of("a.png") is None
    assert decode(content).tobytes() == convert(image).tobytes()


def evaluated(folder: Path, overrides: list[str], size: int) -> Any:
    """On this rank: results of both files, in small batches."""
    model = opened(folder / "run", overrides, size, batch=2)
    files = [open_questions(folder / name, limit=3) for name in ("choices.jsonl", "open.jsonl")]
    found = [evaluate_questions(model, file, tokens=2) for file in files]
    return [(dict(one.metrics), [dict(row) for row in one.rows]) for one in found]


WHOLE = "--transforms.tensor.sequence_parallel=false"
LAYOUTS = [("", 2), (f"--parallel.tp=2 {WHOLE}", 2), ("--parallel.dp_shard=2 --parallel.dp_replicate=2", 4)]


@pytest.mark.parametrize(("layout", "size"), fast(("", 2), of=LAYOUTS))
def test_a_layout_has_the_numbers_of_one_process(world: World, place: Path, layout: str, size: int) -> None:
    """In batches of 2 rows."""
    alone = evaluated(place, [], 1)
    for found in world.run(evaluated, size, place, layout.split(), size):
        for (metrics, rows), (expected, expected_rows) in zip(found, alone, strict=True):
            assert metrics == pytest.approx(expected)
            for row, same in zip(rows, expected_rows, strict=True):
                assert row.get("likelihoods", {}) == pytest.approx(same.get("likelihoods", {}), rel=1e-4)
                assert {**row, "likelihoods": {}} == {**same, "likelihoods": {}}


def mixed(folder: Path, overrides: list[str], size: int) -> Any:
    """On this rank: scores and answers of questions of which the second one has no image; with 3 rows in batches of 1, the last
    batch has a rank without a row."""
    fetch = {"a.png": (folder / "a.png").read_bytes()}.__getitem__
    shown = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What?"}]
    requests = [
        VisualRequest("here", lambda content=content: ([Turn("user", content)], fetch), "B")
        for content in (shown, "What?", shown)
    ]
    model = opened(folder / "run", overrides, size, batch=1)
    return model.likelihoods(requests), model.texts(requests, GenerationSettings((), 3, Sampling()))


@pytest.mark.slow
def test_one_rank_may_have_images_and_the_other_none(world: World, place: Path) -> None:
    scores, texts = mixed(place, [], 1)
    for found, others in world.run(mixed, 2, place, [], 2):
        assert [score for score, _ in found] == pytest.approx([score for score, _ in scores], rel=1e-4)
        assert others == texts


def refused(folder: Path, overrides: list[str], size: int) -> str:
    """On this rank: why the layout is refused."""
    with pytest.raises(ForgeError) as error:
        opened(folder / "run", overrides, size)
    return str(error.value)


@pytest.mark.slow
def test_a_pipeline_is_refused(world: World, place: Path) -> None:
    for why in world.run(refused, 2, place, ["--parallel.pp=2"], 2):
        assert "set parallel.pp = 1" in why or "parallel.pipeline.schedule" in why


def test_a_video_file_is_its_frames(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width = stream.height = 16
        for shade in (0, 60, 120, 180, 240):
            for packet in stream.encode(av.VideoFrame.from_image(Image.new("RGB", (16, 16), (shade,) * 3))):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    clips = Clips(tmp_path, 3, told=True)
    pieces = clips.pieces("clip.mp4")
    assert [piece.get("text") for piece in pieces] == ["0.0s", None, "1.0s", None, "2.0s", None]
    assert [piece["seconds"] for piece in pieces[1::2]] == [0.0, 1.0, 2.0]
    shades = []
    for piece in pieces[1::2]:
        (tmp_path / "frame.ppm").write_bytes(clips.fetch(piece["path"]))
        shades.append(Image.open(tmp_path / "frame.ppm").getpixel((8, 8))[0])  # type: ignore[index]
    assert shades == pytest.approx([0, 120, 240], abs=12)
    assert clip_settings({"data": {"sources": [{"name": "text"}, {"frames": 3, "timestamps": False}]}}) == (3, False)
    assert clip_settings({}) == (8, True)


def test_a_request_that_the_model_cannot_read_names_its_place(place: Path, model: VisualAnswerModel) -> None:
    (place / "broken.png").write_text("words")

    def request(content: Any, answer: str = "A") -> VisualRequest:
        return VisualRequest("row 7", lambda: ([Turn("user", content)], lambda name: (place / name).read_bytes()), answer)

    image = {"type": "image", "path": "a.png"}
    for broken, why in (
        (request([{"type": "image", "path": "broken.png"}]), r"row 7 broken\.png: the image cannot be decoded"),
        (request([image, {"type": "text", "text": "a" * 600}]), r"row 7 has \d+ tokens .* model\.max_length = 512"),
        (request([{"type": "audio"}]), "row 7 has a piece that is neither text nor an image"),
    ):
        with pytest.raises(DataError, match=why):
            model.likelihoods([broken])
    with pytest.raises(ForgeError, match=r"leaves no room for an answer, because model\.max_length = 512"):
        model.texts([request([image, {"type": "text", "text": "a" * 600}])], GenerationSettings((), 4, Sampling()))


def said(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> Any:
    """The JSON document of the command, or its error as one line."""
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *map(str, arguments), *(() if code else ("--json",))])
    assert (ended.value.code or 0) == code
    shown = capsys.readouterr()
    return " ".join(shown.err.split()) if code else json.loads(shown.out)


def test_the_command_reports_files_and_writes_answers(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--questions", place / "choices.jsonl", "--questions", place / "open.jsonl"]
    with pytest.raises(SystemExit):
        main(["evaluate", str(place / "run"), *map(str, files[:2]), "--limit", "2", "--max-tokens", "3"])
    out = capsys.readouterr().out
    assert out.startswith("choices: n 2  letter ") and " ± " in out
    found = said(capsys, place / "run", *files[2:], "--predictions", tmp_path / "said.jsonl", "--max-tokens", 3, "--frames", 2)
    (name,), (metrics,) = found["questions"], found["questions"].values()
    assert (
        name == "open" and metrics["n"] == 3 and found["step"] == 3 and set(metrics) == {"n", "exact_match", "exact_match_stderr"}
    )
    rows = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [row["answers"] for row in rows] == [["a cat"], ["3", "three"], ["nothing"]]
    assert all(row["file"] == "open" and isinstance(row["written"], str) for row in rows)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--metrics", "anls"], "--metrics has no effect without --questions"),
        (["--frames", 3], "--frames has no effect without --lmms or --questions"),
        (["--tasks", "a", "--questions", "q"], "--tasks and --questions exclude each other"),
        (["--lmms", "a", "--lmms", ","], "--lmms names no task"),
        (["--questions", "q", "--shots", 2], "--shots has no effect without --tasks or --lmms"),
        (["--questions", "q", "--recipe", "debug"], r"--recipe (held-out sets) and --questions"),
        (["--questions", "absent.jsonl"], "absent.jsonl does not exist"),
        (["--questions", "q", "--predictions", "absent/said.jsonl"], "the folder absent does not exist; create it"),
    ],
)
def test_options_without_effect_are_refused(given: list[Any], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert why in said(capsys, "absent", *given, code=2)


def test_a_model_without_images_is_refused(tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.toml").write_text(TINY)
    train(tmp_path / "text.toml", ["--train.max_steps=3", '--hooks=[{name="save"}]', f"--job.dir={tmp_path / 'text'}"])
    refused = said(capsys, tmp_path / "text", "--questions", place / "open.jsonl", code=2)
    assert "supports text only; remove --questions, or choose a model with images" in refused
    (tmp_path / "one").mkdir()
    same = lines(tmp_path / "one" / "open.jsonl", OPEN[:1])
    twice = said(capsys, place / "run", "--questions", place / "open.jsonl", "--questions", same, "--folder", place, code=2)
    assert "two files of --questions have the same name" in twice
