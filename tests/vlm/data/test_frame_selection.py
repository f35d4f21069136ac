"""Frames that fit a question: rules against torch and determinants, scores against transformers, and stored scores."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from forge_core.errors import DataError
from forge_vlm.components.frame_scorers import FrameSelection, ImageText, StoredScores
from forge_vlm.components.sources import VideoQuestions
from forge_vlm.data import example_images
from forge_vlm.data.clips import Footage, choose_frames
from forge_vlm.data.frame_scores import FeatureFile, FeatureScorer
from forge_vlm.data.frame_selection import FrameChooser, FrameScores, diverse, top_k
from vlm.data.test_stores import GIVEN, documents, opened
from vlm.data.test_video_readers import grays

DRAWS = range(30)


def drawn(seed: int, frames: int = 9, width: int = 4) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=frames), draw.normal(size=(frames, width))


@pytest.mark.parametrize("seed", DRAWS)
def test_top_k_is_that_of_torch(seed: int) -> None:
    scores, _ = drawn(seed, frames=12)
    for count in (1, 3, 12):
        assert top_k(scores, count) == sorted(torch.topk(torch.from_numpy(scores), count).indices.tolist())


def test_of_equal_scores_the_earlier_frames_are_taken() -> None:
    assert top_k(np.array([1.0, 2.0, 1.0, 2.0, 1.0]), 3) == [0, 1, 3]
    many = np.tile([1.0, 2.0], 50)
    assert top_k(many, 20) == list(range(1, 40, 2)) and top_k(many, 53) == sorted([*range(1, 100, 2), 0, 2, 4])
    same = np.ones((5, 2))
    assert diverse(np.array([1.0, 2.0, 1.0, 2.0, 1.0]), same, 3, 0.5) == [0, 1, 3], "copies differ by nothing but their scores"


def gain(chosen: tuple[int, ...], scores: np.ndarray, features: np.ndarray, relevance: float) -> float:
    """The objective by its definition, with torch's determinant."""
    unit = torch.nn.functional.normalize(torch.from_numpy(features), dim=1)
    kernel = (1 + unit @ unit.T)[list(chosen)][:, list(chosen)] / 2
    fits = (scores - scores.min()) / (scores.max() - scores.min())
    return float(relevance * fits[list(chosen)].sum() + (1 - relevance) * torch.logdet(kernel))


@pytest.mark.parametrize("relevance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", DRAWS)
def test_each_diverse_frame_is_the_best_addition_by_determinants(seed: int, relevance: float) -> None:
    scores, features = drawn(seed)
    chosen: tuple[int, ...] = ()
    for count in range(1, 6):
        best = max((n for n in range(9) if n not in chosen), key=lambda n: gain((*chosen, n), scores, features, relevance))
        chosen = (*chosen, best)
        assert diverse(scores, features, count, relevance) == sorted(chosen)


def test_the_greedy_choice_is_near_the_best_of_all_sets() -> None:
    """Over all 126 sets of 4 of 9 frames: often the best one, and always among the best."""
    ranks = []
    for seed in DRAWS:
        scores, features = drawn(seed)
        sets = sorted(combinations(range(9), 4), key=lambda one: -gain(one, scores, features, 0.5))
        ranks.append(sets.index(tuple(diverse(scores, features, 4, 0.5))))
    assert ranks.count(0) > len(ranks) / 2 and max(ranks) < 13


def test_diverse_frames_leave_out_copies() -> None:
    """Three scenes; the frames of the first fit best. Top-k takes only that scene."""
    scene = np.repeat(np.eye(3), 3, axis=0)
    scores = np.array([1.0, 0.99, 0.98, 0.5, 0.49, 0.48, 0.4, 0.39, 0.38])
    assert top_k(scores, 3) == [0, 1, 2]
    assert diverse(scores, scene, 3, 0.5) == [0, 3, 6]
    assert diverse(scores, scene * 7, 3, 0.5) == [0, 3, 6], "the length of a vector means nothing"
    assert diverse(scores * 40 - 3, scene, 3, 0.5) == [0, 3, 6], "neither does the scale of scores"


def test_many_frames_of_few_scenes_are_chosen_with_finite_numbers() -> None:
    scores = np.linspace(0, 1, 40)
    with np.errstate(all="raise"):
        found = diverse(scores, np.repeat(np.eye(2), 20, axis=0), 10, 0.5)
    assert len(set(found)) == 10 and found == sorted(found)


class Gray:
    """Scores by `of`, a function of the gray of a frame; counts the frames that it scored."""

    identity = "gray"

    def __init__(self, of: Any = float) -> None:
        self.of, self.scored, self.asked = of, 0, []

    def __call__(self, frames: Any, question: str) -> FrameScores:
        self.scored += len(frames)
        self.asked.append(question)
        values = np.array([self.of(frame[0]) for frame in frames], dtype=np.float64)
        return FrameScores(values, np.stack([values, np.ones_like(values)], axis=1))


def chosen(scorer: Any, values: list[int], candidates: int, count: int, relevance: float | None = None) -> list[int]:
    footage = Footage([float(n) for n in range(len(values))], lambda numbers: [str(number) for number in numbers])
    return FrameChooser(scorer, candidates, relevance).choose(footage, lambda name: bytes([values[int(name)]]), "?", count)


def test_candidates_are_equally_spaced_and_chosen_frames_are_in_the_order_of_time() -> None:
    scorer = Gray()
    values = [9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert chosen(scorer, values, 9, 3) == [0, 2, 4] and scorer.scored == 9
    assert chosen(Gray(lambda gray: -gray), values, 5, 2) == [6, 8], "of the candidates 0, 2, 4, 6 and 8"
    assert chosen(Gray(), [3, 1], 9, 2) == [0, 1], "as many as there are"
    few = Gray()
    assert chosen(few, values, 2, 4) == [0, 8] and few.scored == 0, "nothing to choose"


@pytest.mark.parametrize("relevance", [None, 0.5])
def test_equal_scores_give_frames_equally_spaced_in_time(relevance: float | None) -> None:
    values = list(range(11))
    assert chosen(Gray(lambda gray: 0.25), values, 6, 3, relevance) == choose_frames(range(11), 3) == [0, 5, 10]


@pytest.mark.parametrize(
    ("scores", "features", "fault"),
    [
        (np.zeros(2), np.zeros((3, 1)), r"scores of shape \(2,\) and features of shape \(3, 1\) for 3 frames"),
        (np.zeros(3), np.zeros((2, 1)), r"for 3 frames; it must return one score and one vector"),
        (np.array([0, np.nan, 1]), np.zeros((3, 1)), "not finite"),
        (np.zeros(3), np.full((3, 1), np.inf), "not finite"),
    ],
)
def test_scores_that_are_none_are_refused(scores: np.ndarray, features: np.ndarray, fault: str) -> None:
    def scorer(frames: Any, question: str) -> FrameScores:
        return FrameScores(scores, features)

    scorer.identity = "bad"  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=fault):
        chosen(scorer, [1, 2, 3], 3, 2)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"name": "top_k"}, "needs scores; set scorer"),
        ({"name": "uniform", "scorer": StoredScores(path="x")}, "needs no scorer"),
    ],
)
def test_a_rule_and_its_scorer_go_together(keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        FrameSelection(**keys)
    choice = FrameSelection(name="top_k", scorer=StoredScores(path="x"), candidates=4)
    with pytest.raises(ValueError, match="candidates 4 is below frames 8"):
        VideoQuestions(path="x", select=choice)
    assert VideoQuestions(path="x", frames=4, select=choice).select is choice
    with pytest.raises(ValueError, match="chooses frames by one question; set together = 1"):
        VideoQuestions(path="x", frames=2, select=choice, together=2)


# with a model of transformers

transformers = pytest.importorskip("transformers")
KEYS: dict[str, Any] = {"frames": 2, "timestamps": False, **GIVEN}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return example_images.image_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "clip").mkdir()
    for number in range(8):
        (tmp_path / "clip" / f"{number}.png").write_bytes(example_images.picture(number))
    rows = [{"video": "clip", "question": question, "answer": "x"} for question in ("a cat?", "The red one, or blue?")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def theirs(path: str, frames: list[bytes], question: str) -> np.ndarray:
    """Logits of the model's own forward, without scale (and bias) these are cosines."""
    from io import BytesIO

    found = transformers.AutoModel.from_pretrained(path).eval()
    text = transformers.AutoTokenizer.from_pretrained(path)(
        [question], return_tensors="pt", **({"padding": "max_length", "max_length": 16} if "siglip" in path else {})
    )
    processor = transformers.AutoImageProcessor.from_pretrained(path, use_fast=False)
    pixels = processor([Image.open(BytesIO(frame)).convert("RGB") for frame in frames], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        logits = found(input_ids=text["input_ids"], pixel_values=pixels).logits_per_image[:, 0]
        return ((logits - getattr(found, "logit_bias", 0)) / found.logit_scale.exp()).double().numpy()


def siglip(clip: str, folder: Path) -> str:
    """A tiny SigLIP beside the CLIP: the same tokenizer, other towers."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 384, "max_position_embeddings": 16}
    config = transformers.SiglipConfig(text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4})
    torch.manual_seed(3)
    path = folder / "siglip"
    transformers.SiglipModel(config).save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(clip).save_pretrained(path)
    transformers.SiglipImageProcessor(size={"height": 8, "width": 8}).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_scores_are_the_cosines_of_transformers(model: str, tmp_path: Path, family: str) -> None:
    path = model if family == "clip" else siglip(model, tmp_path)
    frames = [example_images.picture(number) for number in range(5)]
    scores, features = ImageText(path=path, batch=2).build()(frames, "the red one")
    np.testing.assert_allclose(scores, theirs(path, frames, "the red one"), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, atol=1e-6)
    assert scores.std() > 1e-3, "the frames of this test fit differently"


@pytest.mark.parametrize("name", ["top_k", "diverse"])
def test_a_source_shows_the_frames_that_fit_its_question(model: str, corpus: Path, name: Any) -> None:
    choice = FrameSelection(name=name, scorer=ImageText(path=model), candidates=8)
    source = opened(VideoQuestions(path=str(corpus / "rows.jsonl"), select=choice, **KEYS), corpus / "w")
    frames = [example_images.picture(number) for number in range(8)]
    wanted = []
    for question in ("a cat?", "The red one, or blue?"):
        scores, features = ImageText(path=model).build()(frames, question)
        wanted += top_k(theirs(model, frames, question), 2) if name == "top_k" else diverse(scores, features, 2, 0.7)
    assert [source.reference(number) for number in range(4)] == [f"clip/{number}.png" for number in wanted]
    assert len({*wanted}) > 2, "the questions of this test choose different frames"


def test_stored_features_replace_the_model(model: str, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(corpus / "features")
    encoded: list[int] = []
    ours = ImageText(path=model, store=file)
    choice = FrameSelection(name="diverse", scorer=ours, candidates=8)
    component = VideoQuestions(path=str(corpus / "rows.jsonl"), select=choice, **KEYS)
    scorer: Any = ours.build()
    inner = type(scorer._encoder).images
    monkeypatch.setattr(type(scorer._encoder), "images", lambda self, frames: encoded.append(len(frames)) or inner(self, frames))
    first = opened(component, corpus / "w")
    assert sum(encoded) == 8, "two questions about one clip encode its frames once"
    frames = [first.reference(number) for number in range(4)]
    again = opened(component, corpus / "other")
    assert sum(encoded) == 8 and [again.reference(number) for number in range(4)] == frames
    stored = replace(component, select=replace(choice, scorer=StoredScores(path=file)))
    monkeypatch.setattr(type(scorer._encoder), "__init__", None)
    without = opened(stored, corpus / "third")
    assert [without.reference(number) for number in range(4)] == frames
    assert opened(stored, corpus / "w").fingerprint == first.fingerprint, "the store of the model's machine is found"
    (corpus / "clip" / "3.png").write_bytes(example_images.picture(99))
    with pytest.raises(DataError, match=r"rows\.jsonl at byte 0 .*has no features of 1 of 8 frames or questions; prepare"):
        opened(stored, corpus / "fourth")


def test_files_of_features_that_do_not_fit_are_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; prepare the data once with scorer 'image_text' and store"):
        StoredScores(path=str(tmp_path / "none")).build()
    FeatureFile(str(tmp_path / "empty"), new=True)
    with pytest.raises(DataError, match="has features of 0 models, but scorer 'stored' needs those of one"):
        StoredScores(path=str(tmp_path / "empty")).build()
    (tmp_path / "text").write_text("not a table" * 100)
    for build in (StoredScores(path=str(tmp_path / "text")).build, ImageText(path=model, store=str(tmp_path / "text")).build):
        with pytest.raises(DataError, match=r"text cannot be read or written as a file of features: .*; set `store`"):
            build()
    file = FeatureFile(str(tmp_path / "two"), new=True)
    for value, name in enumerate(("one", "other")):
        file.add(name, {b"x": np.full(2, value)})
    assert file.models == ["one", "other"] and file.read("one", [b"x", b"y"])[b"x"].tolist() == [0, 0]
    assert file.read("other", [b"x"])[b"x"].tolist() == [1, 1]
    with pytest.raises(DataError, match="has features of 2 models"):
        FeatureScorer(None, file)


def test_folders_that_are_no_model_are_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json cannot be read: .*; give a folder of a model"):
        ImageText(path=str(tmp_path)).build()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DataError, match="has model_type 'llama'; give a folder of a model of clip, siglip"):
        ImageText(path=str(tmp_path)).build()
    (tmp_path / "config.json").write_text((Path(model) / "config.json").read_text())
    with pytest.raises(DataError, match="cannot be read as a model of text and images"):
        ImageText(path=str(tmp_path)).build()([example_images.picture(0)], "x")
    with pytest.raises(DataError, match="a frame"):
        ImageText(path=model).build()([b"not an image"], "x")


def test_another_rule_or_model_prepares_other_data(model: str, corpus: Path) -> None:
    choice = FrameSelection(name="diverse", scorer=ImageText(path=model), candidates=8)
    changes: list[Any] = [{"relevance": 0.2}, {"candidates": 4}, {"name": "top_k"}, {"name": "uniform", "scorer": None}]
    changes.append({"scorer": ImageText(path=siglip(model, corpus))})
    component = VideoQuestions(path=str(corpus / "rows.jsonl"), select=choice, **KEYS)
    paths = [opened(replace(component, select=replace(choice, **change)), corpus / "w").path for change in changes]
    assert len({opened(component, corpus / "w").path, *paths}) == 6
    fast = replace(component, select=replace(choice, scorer=ImageText(path=model, batch=3)))
    assert opened(fast, corpus / "w").path == opened(component, corpus / "w").path
    assert len(documents(opened(component, corpus / "w"))) == 2 and len(grays(opened(component, corpus / "w"))) == 4
