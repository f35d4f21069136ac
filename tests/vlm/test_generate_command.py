"""`forge-train generate --image`: the prompt is that of training, id by id and pixel by pixel, and the text is the model's."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from forge_core.batch import Batch
from forge_core.errors import DataError
from forge_core.protocols.weights import WeightsInfo
from forge_core.registry import Registry
from forge_data.chat.conversation import Chat, Turn
from forge_data.loading.stream import open_stream
from forge_data.section import Data
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_train.cli import main
from forge_train.formats.forge import job_of
from forge_train.inference.stored import load_model, open_weights
from forge_train.inference.tokenizer import chat_for, tokenizer_for
from forge_vlm.components.encoders import Features
from forge_vlm.components.fusions import MixtureOfTransformers
from forge_vlm.data.documents import Fields, chat_prompt_of, parts_of
from forge_vlm.data.prompts import Prompts, image_inputs
from train.runs import train
from vlm.data.templates import IMAGES, TEXT
from vlm.tiny import JOINT
from vlm.tiny import TEXT as DECODER
from vlm.visual_run import RECIPE

PLACEHOLDER = 299
USER, SAYS = "user", {"role": "assistant", "content": "It is a cat."}
TALKS: list[tuple[list[dict[str, str]], list[str]]] = [
    ([{"role": USER, "content": "<image>What is it?"}], ["a.png"]),
    ([{"role": USER, "content": "Here <image>and there<image> <|im_end|>?"}], ["b.jpg", "a.png"]),
    ([{"role": USER, "content": "What is it?"}], ["c.png"]),
    ([{"role": USER, "content": "<image>Is it?"}, SAYS, {"role": USER, "content": "Of what color?"}], ["a.png"]),
]
TEXTS = [("<image>one", ["a.png"]), ("first <image> then <image>", ["c.png", "b.jpg"]), ("of it", ["b.jpg"])]


@pytest.fixture(scope="module", params=[("joint_decoder", "anyres"), ("cross_attention", "square")], ids=lambda pair: pair[0])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, records that show them, and a run on these."""
    folder = tmp_path_factory.mktemp("shown")
    draw = torch.Generator().manual_seed(1)
    for name, size in (("a.png", (9, 21, 3)), ("b.jpg", (30, 11, 3)), ("c.png", (8, 8, 4))):
        Image.fromarray(torch.randint(0, 256, size, generator=draw, dtype=torch.uint8).numpy()).save(folder / name)
    records: list[dict[str, Any]] = [{"messages": [*turns, SAYS], "image": images} for turns, images in TALKS]
    records += [{"text": text, "image": images} for text, images in TEXTS]
    (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    fusion, tiling = request.param
    (folder / "r.toml").write_text(RECIPE.format(template="chatml", folder=folder, fusion=fusion, tiling=tiling))
    train(folder / "r.toml", [f"--job.dir={folder / 'run'}"])
    return folder


def batches(weights: Any, workspace: Path) -> list[Batch]:
    """Those that training makes of the records, one each, in their order."""
    data: Data = job_of(weights.meta, Registry(), "data", "job").data
    chosen = Data(
        sources=list(data.sources), tokenizer=data.tokenizer, sequence_length=256, packing="pad", shuffle="none", epochs=1
    )
    stream = open_stream(chosen, workspace=workspace, global_batch=1, micro_batch=1, seed=0, model=weights.model)
    return [batch for found, _ in islice(stream.from_cursor(stream.start()), len(TALKS) + len(TEXTS)) for batch in found]


def test_a_prompt_is_what_training_makes_of_the_same_record(place: Path) -> None:
    """Also with a control token that the user spells, and with images of several tiles."""
    weights = open_weights(place / "run", Registry())
    coder = tokenizer_for(weights, None, Registry(), lambda _: None)
    chat = chat_for(weights, coder)
    made = batches(weights, place / "run" / "data")
    for number, (given, images) in enumerate([*TALKS, *TEXTS]):
        prompts = Prompts(coder, chat, [str(place / name) for name in images], image_inputs(weights))
        if isinstance(given, str):
            prompt = prompts.text(given)
        else:
            prompt = prompts.conversation([Turn(turn["role"], turn["content"]) for turn in given])
        batch = made[number]
        assert batch.tokens[0, : len(prompt.ids)].tolist() == prompt.ids
        assert prompt.ids.count(PLACEHOLDER) == (batch.tokens == PLACEHOLDER).sum()
        assert prompt.inputs.keys() == batch.extras.keys()
        assert all(torch.equal(prompt.inputs[name], tensor) for name, tensor in batch.extras.items())
        if not isinstance(given, str) and len(given) == 1:
            assert (batch.labels[0] >= 0).nonzero()[0].item() == len(prompt.ids) - 1, "the first learned token is the answer's"


def greedy(model: Any, ids: list[int], inputs: Any, count: int) -> list[int]:
    """By whole forwards, without a cache."""
    new: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *new]]), **inputs)[0, -1]
        logits[PLACEHOLDER] = -torch.inf
        new.append(int(logits.argmax()))
    return new


def said(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    """The JSON document of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["generate", *map(str, arguments), "--json"])
    assert not ended.value.code
    return json.loads(capsys.readouterr().out)


def test_the_command_shows_images_to_the_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = open_weights(place / "run", Registry())
    model, made = load_model(weights), batches(weights, place / "run" / "data")
    coder = tokenizer_for(weights, None, Registry(), lambda _: None)
    for number in (1, len(TALKS) + 1):
        given, images = [*TALKS, *TEXTS][number]
        talk = not isinstance(given, str)
        prompt = given[0]["content"] if talk else given
        files = [word for name in images for word in ("--image", place / name)]
        options = ["--prompt", prompt, *files, *(["--chat"] if talk else []), "--temperature", 0, "--max-tokens", 6]
        found = said(capsys, place / "run", *options)
        batch = made[number]
        size = int((batch.labels[0] >= 0).nonzero()[0]) + 1 if talk else int((batch.tokens[0] == coder.eos).nonzero()[0])
        new = greedy(model, batch.tokens[0, :size].tolist(), batch.extras, 6)
        kept = new[: new.index(coder.eos)] if coder.eos in new else new
        assert found["text"] == coder.decode([token for token in kept if token < coder.vocab_size])
        assert found["images"] == [str(place / name) for name in images]
        blind = {**batch.extras, "images": 1 - batch.extras["images"]}
        with torch.no_grad():
            one, other = (model(batch.tokens[:, :size], **inputs)[0, -1] for inputs in (batch.extras, blind))
        assert (one - other).abs().max() > 1e-3, "the image matters"


CAT = [{"type": "image"}, {"type": "text", "text": "A cat or an <image>?"}]
"""What a user says, with the marker of images as text."""


@pytest.mark.parametrize("template", [*IMAGES.values(), TEXT["qwen2.5"], "<|img|>"], ids=[*IMAGES, "text", "token"])
def test_a_marker_in_a_piece_of_text_is_text(template: str) -> None:
    """Where the pieces themselves say which images there are; with any kind of template, in training and in a prompt."""
    if template == "<|img|>":  # a token of its own, in the place of each image
        template = IMAGES["qwen2vl"].replace("[INST]<image>[/INST]", template)
    chat = Chat(template)
    record = {
        "messages": [{"role": "user", "content": CAT}, {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}]
    }
    parts = parts_of(record | {"image": "a.png"}, Fields(), chat)
    pictures = [part for part in parts if not hasattr(part, "text")]
    assert [picture.reference for picture in pictures] == ["a.png"]
    words = [part for part in parts if hasattr(part, "text")]
    assert "".join(part.text for part in words).count("<image>") == 1
    assert not any(part.trusted for part in words if "<image>" in part.text)


def test_images_without_a_marker_stand_where_the_template_puts_them() -> None:
    for template, before in ((IMAGES["llava"], "USER: "), (IMAGES["qwen2vl"], "<|im_start|>user\n[INST]"), (TEXT["qwen2.5"], "")):
        turns = [Turn("user", "What?"), Turn("assistant", "An <image>."), Turn("user", "No <image>.")]
        parts = chat_prompt_of(turns, ["a.png"], Chat(template))
        at = next(place for place, part in enumerate(parts) if not hasattr(part, "text"))
        assert "".join(part.text for part in parts[:at]) == before
        assert sum(part.text.count("<image>") for part in parts if hasattr(part, "text")) == 2, "what is said later is text"


def test_what_cannot_be_shown_is_refused_with_what_to_do(tmp_path: Path) -> None:
    def inputs(model: Any, tilings: tuple[str, ...] = ()) -> Any:
        facts = WeightsInfo(origin="run", recipe={"data": {"sources": [{"tiling": {"name": name}} for name in tilings]}})
        return image_inputs(SimpleNamespace(model=model, facts=facts))  # type: ignore[arg-type]

    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    for name in ("clip.mp4", "words.png"):
        (tmp_path / name).write_text("words")
    image, found = str(tmp_path / "a.png"), inputs(JOINT, ("anyres", "anyres"))
    assert found.tiling.name == "anyres" and inputs(JOINT).tiling.name == "square"
    tokens = replace(JOINT, fusion=MixtureOfTransformers(), images="tokens", encoder=None, modalities={"image": (30, 40)})

    def prompts(*images: str) -> Prompts:
        return Prompts(ByteTokenizer(), Chat(), images, found)

    for refused, why in (
        (lambda: inputs(DECODER), "supports text only; remove --image"),
        (lambda: inputs(tokens), "was trained on image tokens .* remove --image"),
        (lambda: inputs(replace(JOINT, encoder=Features(count=4, dim=8))), "expects precomputed features"),
        (lambda: inputs(JOINT, ("anyres", "square")), "different tilings .*'anyres', 'square'.* hook `answers`"),
        (lambda: prompts("https://x.org/a.png"), "download the image"),
        (lambda: prompts(str(tmp_path / "clip.mp4")), "is a video; save frames"),
        (lambda: prompts(str(tmp_path / "absent.png")), "absent.png cannot be read: No such file"),
        (lambda: prompts(str(tmp_path)), "cannot be read: Is a directory"),
        (lambda: prompts(str(tmp_path / "words.png")), "words.png: the image cannot be decoded"),
        (lambda: prompts(image).text("<image> and <image>"), "has 2 <image> and 1 images; write <image> once per --image"),
        (lambda: prompts(image, image).conversation([Turn("user", "<image>")]), "has 1 <image> and 2 images"),
        (lambda: prompts(image).text("\ud83d"), "lone surrogate U\\+D83D at character 0$"),
    ):
        with pytest.raises(DataError, match=why):
            refused()


def test_options_that_exclude_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lines.txt").write_text("a\nb\n")
    for option in (["--prompts", str(tmp_path / "lines.txt")], ["--prompt", "a", "--speculate"]):
        with pytest.raises(SystemExit) as ended:
            main(["generate", "absent", "--image", "a.png", *option])
        assert ended.value.code == 2
        assert f"cannot be combined with {'--prompts' if '--prompts' in option else '--speculate'}" in " ".join(
            capsys.readouterr().err.split()
        )
