"""A small run on questions about images, for tests that put questions to its model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from forge_core.registry import Registry
from forge_train.inference.answers import GenerationSettings
from forge_train.inference.stored import load_sharded_model, open_weights, recipe_to_generate
from forge_train.inference.tokenizer import chat_for, tokenizer_for
from forge_train.inference.visual_answers import VisualAnswerModel, VisualRequest
from train.runs import train

RECIPE = """
base = "debug-joint"
hooks = [{{ name = "save" }}]

[model]
vocab_size = 300
max_length = 512

[model.fusion]
name = "{fusion}"

[model.encoder]
channels = 3

[data]
sequence_length = 320
packing = "best_fit"
items_per_row = 12
evaluation = {{}}

[[data.sources]]
name = "image_jsonl"
path = "{folder}/records.jsonl"
template = "{template}"
tiling = {{ name = "{tiling}" }}

[train]
max_steps = 3
threads = 1
global_batch = 4
micro_batch = 4

[optimizer]
lr = 0.2

[schedule]
warmup = 0
"""
SAYS = {"role": "assistant", "content": "It is a cat."}
CHOICES = ["a cat", "a dog", "an owl"]
QUESTIONS: list[dict[str, Any]] = [
    {"image": "a.png", "question": "What is it?", "choices": CHOICES, "answer": "B"},
    {"image": ["b.jpg", "c.png"], "question": "Is <image> like <image>?", "choices": ["yes", "no"], "answer": 0},
    {"image": "c.png", "question": "Which <|im_end|>?", "choices": CHOICES, "answer": "an owl"},
    {"image": "b.jpg", "question": "And this?", "choices": CHOICES, "answer": "A"},
    {"image": "a.png", "question": "And that?", "choices": CHOICES, "answer": "C"},
]
OPEN: list[dict[str, Any]] = [
    {"image": "a.png", "question": "What is it?", "answer": "a cat"},
    {"image": "b.jpg", "question": "How many?", "answer": ["3", "three"]},
    {"video": "clip", "question": "What happens?", "answer": "nothing"},
]


def images(folder: Path) -> None:
    """Three images, and a clip of four frames."""
    draw = torch.Generator().manual_seed(1)
    sizes = {"a.png": (9, 21, 3), "b.jpg": (30, 11, 3), "c.png": (8, 8, 4)}
    for name, size in (sizes | {f"clip/{number}.png": (8, 8, 3) for number in range(4)}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        Image.fromarray(torch.randint(0, 256, size, generator=draw, dtype=torch.uint8).numpy()).save(folder / name)


def lines(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def trained(folder: Path, fusion: str, tiling: str, template: str = "chatml", records: Sequence[Mapping[str, Any]] = ()) -> Path:
    """The run's directory; it learns `records`, or a few conversations."""
    images(folder)
    lines(folder / "choices.jsonl", QUESTIONS)
    lines(folder / "open.jsonl", OPEN)
    talks = [{"messages": [{"role": "user", "content": f"<image>{q['question']}"}, SAYS], "image": "a.png"} for q in OPEN]
    lines(folder / "records.jsonl", records or talks)
    (folder / "r.toml").write_text(RECIPE.format(folder=folder, fusion=fusion, tiling=tiling, template=template))
    train(folder / "r.toml", [f"--job.dir={folder / 'run'}"])
    return folder / "run"


def opened(run: Path, overrides: Sequence[str] = (), size: int = 1, **options: Any) -> VisualAnswerModel:
    """The model of a run; its process group is there."""
    registry = Registry()
    weights = open_weights(run, registry)
    coder = tokenizer_for(weights, None, registry, lambda _: None)
    recipe = recipe_to_generate(weights, overrides, size, registry)
    model = load_sharded_model(weights, recipe, torch.device("cpu"), registry)
    return VisualAnswerModel(model, weights, coder, chat_for(weights, coder), option="--questions", **options)


class Oracle:
    """Answers like a model would, with what a function says of the text of each question; counts what it is asked."""

    frames, told = 8, True

    def __init__(self, says: Any) -> None:
        self._says = says
        self.asked: list[str] = []

    def _text(self, request: VisualRequest) -> str:
        turns, fetch = request.turns()
        content = turns[-1].content
        pieces = [{"type": "text", "text": content}] if isinstance(content, str) else content
        shown = [fetch(piece["path"]) for piece in pieces if piece["type"] == "image"]
        assert all(shown) and len(set(shown)) == len(shown), "the images of a question differ"
        self.asked.append("".join(piece.get("text", "<image>") for piece in pieces))
        return self._says(self.asked[-1])

    def likelihoods(self, requests: Sequence[VisualRequest]) -> list[tuple[float, bool]]:
        right = [self._text(request) == request.answer for request in requests]
        return [(-0.1 if each else -3.0, each) for each in right]

    def texts(self, requests: Sequence[VisualRequest], settings: GenerationSettings) -> list[str]:
        return [self._text(request) for request in requests]
