"""The time of a frame is added to its vectors: by its formula, from the data to the model, and not at all at the start."""

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from forge_core.batch import Batch
from forge_core.errors import ForgeError
from forge_core.specs import Init
from forge_data.components import Bytes
from forge_data.loading.evaluation import inputs_of, questions
from forge_data.loading.stream import open_stream
from forge_data.section import Data
from forge_models import initialize
from forge_testing.modules import InMemory
from forge_train.run.loop import fit
from forge_vlm.components.encoders import Features, ViT
from forge_vlm.components.fusions import CrossAttention, MixtureOfTransformers
from forge_vlm.components.model import VLM, FrameTimeConfig
from forge_vlm.components.sources import ImageJsonl, VideoFrames, VideoQuestions
from forge_vlm.data.store import FILES
from forge_vlm.frame_time import FrameTime
from forge_vlm.hf.auto import misfits
from forge_vlm.hf.llava import Llava
from forge_vlm.hooks import swap_images
from forge_vlm.images.tiling import Tiling
from train.runs import TINY, prepared
from vlm.data.test_stores import opened, square
from vlm.test_flops import batch_of, counted
from vlm.test_flops import rows as rows_of
from vlm.tiny import JOINT, MODELS, batch, build, row

TIMED = replace(JOINT, frame_time=FrameTimeConfig(features=6, shortest=0.5, longest=8.0))
ROWS = batch(row(TIMED, 3, "1", 4, "2", 5), row(TIMED, "3", 7, "4", 8, 9))
TIMES = torch.tensor([0.0, 1.25, -1.0, 7.0])


def test_waves_are_those_of_the_formula() -> None:
    """Periods of 0.5, 2 and 8 seconds; the matrix picks one wave at a time."""
    part: Any = FrameTime(6, 6, 0.5, 8.0)
    part.proj.weight.data = torch.eye(6)
    found = part(torch.tensor([0.0, 1.3, -1.0, 3600.25]))
    for number, seconds in enumerate((0.0, 1.3, None, 3600.25)):
        angles = [] if seconds is None else [2 * math.pi * seconds / period for period in (0.5, 2.0, 8.0)]
        wanted = [*map(math.sin, angles), *map(math.cos, angles)] or [0.0] * 6
        assert found[number].tolist() == pytest.approx(wanted, abs=1e-5)
    single: Any = FrameTime(2, 2, 4.0, 100.0)
    single.proj.weight.data = torch.eye(2)
    assert single(torch.tensor([1.0])).tolist()[0] == pytest.approx([1.0, 0.0], abs=1e-6)


def test_the_matrix_starts_at_zero_and_belongs_to_the_adapter() -> None:
    specs = TIMED.build().specs()
    assert specs.tensors["frame_time.proj.weight"].init == Init("zeros")
    assert "frame_time" in specs.entry and "frame_time.proj.weight" in specs.roles["adapter"]
    assert "frame_time" not in JOINT.build().specs().entry


@pytest.mark.parametrize("name", ["joint", "cross", "mot", "moma-token"])
def test_a_model_keeps_its_bits_at_the_start_and_then_looks_at_times(name: str) -> None:
    plain = MODELS[name]
    timed = replace(plain, frame_time=FrameTimeConfig(features=8))
    given = batch(row(plain, 3, "1", 4, "2", 5), row(plain, "3", 7, "4", 8, 9))
    given = {key: value.float() if value.is_floating_point() else value for key, value in given.items()}
    first, second = plain.build(), timed.build()
    for module in (first, second):
        initialize(module, seed=4)
        module.eval()
    with torch.no_grad():
        for module in (first, second):
            for tensor in (one for key, one in module.named_parameters() if key.endswith("gate")):
                tensor.fill_(0.5)  # gates start closed
        wanted = first(**given)
        assert torch.equal(second(**given), wanted) and torch.equal(second(**given, image_times=TIMES), wanted)
        second.frame_time.proj.weight.normal_(generator=torch.Generator().manual_seed(1))  # type: ignore[union-attr,operator]
        found = second(**given, image_times=TIMES)
        assert torch.equal(second(**given), wanted), "images without times stay as they are"
        assert not torch.equal(found, wanted)
        later = second(**given, image_times=torch.tensor([0.0, 1.25, -1.0, 8.0]))
    assert torch.equal(later[0], found[0]) and not torch.equal(later[1], found[1]), "the time of a frame changes its row alone"


def test_a_time_is_added_to_every_vector_of_its_frame() -> None:
    model: Any = build(TIMED)
    seen: list[torch.Tensor] = []
    model.blocks["0"].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(**ROWS)
    model(**ROWS, image_times=TIMES)
    added = (seen[1] - seen[0]).detach()
    vectors = model.frame_time(TIMES).detach()
    here = ROWS["x"] == 39
    assert not added[~here].any()
    numbers = torch.tensor([0] * 4 + [1] * 4 + [2] * 4 + [3] * 4)
    torch.testing.assert_close(added[here], vectors[numbers])
    assert not vectors[2].any() and vectors[[0, 1, 3]].abs().max() > 0.01


def test_the_matrix_has_a_gradient_on_every_rank() -> None:
    """Of zeros where no image has a time, or a row no image."""
    for given, some in (
        ({**ROWS, "image_times": TIMES}, True),
        (ROWS, False),
        ({**ROWS, "image_times": torch.full((4,), -1.0)}, False),
        ({"x": ROWS["x"].clamp(max=20)}, False),
    ):
        model = build(TIMED).train()
        model(**given).square().sum().backward()
        gradient = model.get_parameter("frame_time.proj.weight").grad
        assert gradient is not None and bool(gradient.any()) == some


def test_times_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"image_times has shape \(3,\) for 4 images"):
        build(TIMED)(**ROWS, image_times=TIMES[:3])
    with pytest.raises(ValueError, match=r"image_times need a model that adds them; set model.frame_time"):
        build(JOINT)(**ROWS, image_times=TIMES)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"features": 7}, "features 7 is odd"),
        ({"shortest": 3.0, "longest": 3.0}, "longest 3.0 must exceed frame_time.shortest 3.0"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        FrameTimeConfig(**keys)


def test_tokens_have_no_times_and_no_format_holds_them() -> None:
    sizes = {"dim": 16, "layers": 2, "heads": 4, "vocab_size": 40, "max_length": 64}
    with pytest.raises(ValueError, match="frame_time is added to an encoder's vectors"):
        VLM(**sizes, images="tokens", modalities={"image": (30, 40)}, frame_time=FrameTimeConfig())
    assert any("frame_time" in why for why in misfits(TIMED))
    assert any("frame_time" in why for why in Llava().misfits(InMemory(TIMED)))


@pytest.mark.parametrize("fusion", [None, CrossAttention(every=2), MixtureOfTransformers()])
def test_products_are_those_of_torchs_counter(fusion: Any) -> None:
    """Waves and pixels have no gradient, which the convention of three forwards does not know."""
    plain = JOINT if fusion is None else replace(JOINT, fusion=fusion)
    timed = replace(plain, frame_time=FrameTimeConfig(features=6))
    given = {**rows_of(plain, 2)}
    with_times = {**given, "image_times": torch.tensor([0.0, 1.0, 2.0, 3.0])}
    more = counted(build(timed).train(), with_times, True) - counted(build(plain).train(), given, True)
    images, product = 4, 2 * 6 * 16
    assert more == 2 * images * product
    assert timed.counts().beyond([batch_of(given)]) - plain.counts().beyond([batch_of(given)]) == 3 * images * product
    assert timed.counts().parameters - plain.counts().parameters == 6 * 16


def test_images_of_other_rows_bring_their_times() -> None:
    from vlm.test_hooks import _batch

    one = _batch([[0], [1]], [[1, 2], [3, 4]], 0.0)
    one = replace(one, extras={**one.extras, "image_times": torch.tensor([0.5, 9.0])})
    (found,), _ = swap_images([one])
    assert found.extras["images"].flatten().tolist() == [1.0, 0.0] and found.extras["image_times"].tolist() == [9.0, 0.5]


def test_batches_of_checks_have_frames_and_images_without_a_time() -> None:
    """What the comparison of layouts rests on."""
    tokens = torch.randint(1, 38, (16, 32), generator=torch.Generator().manual_seed(2))
    made = TIMED.build().with_extras(Batch(tokens, tokens.clone()))
    times = made.extras["image_times"]
    assert len(times) == len(made.extras["images"]) > 6 and (times < 0).any() and len({*times.tolist()}) > 4
    assert "image_times" not in JOINT.build().with_extras(Batch(tokens, tokens.clone())).extras


# data

MODEL = VLM(
    dim=16,
    layers=1,
    heads=2,
    vocab_size=301,
    max_length=256,
    encoder=ViT(size=8, patch=4, channels=3, dim=8, layers=1, heads=2),
    frame_time=FrameTimeConfig(features=4),
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A clip with times, one of two frames a second, and an image."""
    for name, count in (("a", 3), ("b", 5)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (8, 8), (10 * number,) * 3).save(tmp_path / name / f"{number}.png")
    clips = [{"video": "a", "text": "x", "times": [0.25, 1, 7.5]}, {"video": "b", "text": "y", "fps": 2}, {"text": "z"}]
    (tmp_path / "clips.jsonl").write_text("".join(json.dumps(clip) + "\n" for clip in clips))
    (tmp_path / "i.png").write_bytes(square(200, side=16))
    (tmp_path / "images.jsonl").write_text(json.dumps({"image": "i.png", "text": "i"}) + "\n")
    return tmp_path


def test_a_store_has_the_times_of_frames(corpus: Path) -> None:
    component = VideoFrames(path=str(corpus / "clips.jsonl"), frames=3)
    source = opened(component, corpus / "w", MODEL)
    assert source.extras == ("images", "image_rows", "image_times")
    assert source.item_values(0, 6).tolist() == [0.25, 1, 7.5, 0, 1, 2] and source.item_values(4, 5).tolist() == [1]
    plain = opened(component, corpus / "w", replace(MODEL, frame_time=None))
    assert plain.extras == ("images", "image_rows") and plain.path != source.path
    assert {file.stem for file in plain.path.glob("*.bin")} == set(FILES)
    tiled = opened(ImageJsonl(path=str(corpus / "images.jsonl"), tiling=Tiling(name="grid")), corpus / "w", MODEL)
    assert tiled.item_values(0, 3).tolist() == [-1, -1, -1], "an image is no frame"
    (source.path / "times.bin").write_bytes(b"")
    with pytest.raises(ForgeError, match=r"times\.bin has 0 bytes instead of 24"):
        opened(component, corpus / "w", MODEL)


def test_a_truncated_clip_keeps_the_times_of_its_frames(corpus: Path) -> None:
    """A row of 13 tokens has five of text and two frames of four placeholders, not the third frame; the next clip fits."""
    rows = [{"video": "b", "text": "long <image>"}, {"video": "a", "text": "<image>x", "times": [0.25, 1, 7.5]}]
    (corpus / "clips.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    component = VideoFrames(path=str(corpus / "clips.jsonl"), frames=3, timestamps=False, too_long="truncate")
    source = opened(component, corpus / "w", MODEL, length=13)
    count = int(source.items_before(np.array([source.tokens]))[0])
    assert [source.reference(number) for number in range(count)] == [
        *("b/0.png", "b/2.png"),
        *("a/0.png", "a/1.png", "a/2.png"),
    ]
    assert source.item_values(0, count).tolist() == [0, 2, 0.25, 1, 7.5]


def test_frames_and_images_come_in_one_batch_with_their_times(corpus: Path) -> None:
    sources = [
        VideoFrames(path=str(corpus / "clips.jsonl"), frames=3, timestamps=False, weight=3),
        ImageJsonl(path=str(corpus / "images.jsonl"), weight=1),
    ]
    chosen = Data(sources=sources, sequence_length=32, packing="pad", tokenizer=Bytes())
    stream = open_stream(chosen, workspace=corpus / "w", global_batch=4, micro_batch=4, seed=2, model=MODEL)
    wanted = {"x": [0.25, 1, 7.5], "y": [0, 1, 2], "i": [-1], "z": []}
    for (found,), _ in islice(stream.from_cursor(stream.start()), 3):
        assert len(found.extras["image_times"]) == len(found.extras["images"])
        for number, ids in enumerate(found.tokens.tolist()):
            text = next(chr(token) for token in ids if token < 256)
            images = [image for image in found.extras["image_rows"][number].tolist() if image >= 0]
            assert found.extras["image_times"][images].tolist() == wanted[text]


def test_questions_for_answers_have_times(corpus: Path) -> None:
    (corpus / "ask.jsonl").write_text(json.dumps({"video": "b", "question": "?", "answer": "!"}) + "\n")
    source = opened(VideoQuestions(path=str(corpus / "ask.jsonl"), frames=2), corpus / "w", MODEL)
    (asked,) = questions(source, 4)
    given = inputs_of(source, [asked])
    assert given["image_times"].tolist() == [0, 4] and len(given["images"]) == 2


def test_precomputed_features_take_times_too() -> None:
    model = replace(TIMED, encoder=Features(count=4, dim=8)).build()
    initialize(model, seed=0)
    images = torch.randn(4, 4, 8)
    out = model(ROWS["x"], images=images, image_rows=ROWS["image_rows"], image_times=TIMES)
    assert out.shape == (*ROWS["x"].shape, 40)


def test_a_run_with_times_starts_from_one_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The parameter is named as drawn, and is zero; all others are those of the run."""
    caplog.set_level("INFO")
    (tmp_path / "tiny.toml").write_text(TINY.replace('name = "decoder"', 'name = "vlm"'))
    vision = "--model.encoder={name='vit', size=8, patch=4, dim=8, layers=1, heads=2}"
    short = ["--schedule.name=constant", "--train.max_steps=2", "--model.vocab_size=62", vision]
    run, _ = prepared(tmp_path / "tiny.toml", [f"--job.dir={tmp_path / 'one'}", *short])
    fit(run)
    before = {name: tensor.detach().clone() for name, tensor in run.model.tensors()}
    more = [f"--start.weights={tmp_path / 'one'}", "--model.frame_time.features=8", f"--job.dir={tmp_path / 'two'}"]
    run, _ = prepared(tmp_path / "tiny.toml", [*short, *more])
    said = next(record.message for record in caplog.records if "drawn from job.seed" in record.message)
    assert "frame_time.proj.weight" in said and "encoder." not in said
    after = dict(run.model.tensors())
    assert not after.pop("frame_time.proj.weight").any()
    assert after.keys() == before.keys() and all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    fit(run)
