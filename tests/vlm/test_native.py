"""Images in their own proportions (SigLIP 2 NaFlex) from files to logits: sources, placeholders, adapters, fusions, runs."""

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from forge_core.batch import Batch
from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_interp.tap_names import taps
from forge_models.hf.streamed_forward import fixed_rows
from forge_train.run.loop import fit
from forge_vlm.components.adapters import (
    AttentionPoolConfig,
    AveragePoolConfig,
    LinearConfig,
    MLPConfig,
    PerceiverConfig,
    PixelShuffleConfig,
)
from forge_vlm.components.encoders import SigLIP2
from forge_vlm.components.fusions import CrossAttention, JointDecoder, MixtureOfTransformers, MoMa
from forge_vlm.components.model import VLM
from forge_vlm.components.sources import ImageJsonl
from forge_vlm.data import inputs
from forge_vlm.fusion.fusion import Misplaced, feature_places
from forge_vlm.hooks import swap_images
from forge_vlm.images.pixels import native_grid, native_item, native_patches, split_native
from forge_vlm.images.processing import Native
from forge_vlm.images.tiling import Tiling
from forge_vlm.model import VisionLanguageModel
from harness.pool import World
from train.runs import prepared, train
from vlm.encoders.test_flexible import MOST, PATCH, photo, stored
from vlm.tiny import EXPERTS, PARTS, SIZES, build

SHAPES = [(40, 40), (61, 17), (13, 50), (90, 9)]
HOLE = 299
KINDS: dict[str, dict[str, Any]] = {
    "joint": {"fusion": JointDecoder(), "adapter": MLPConfig()},
    "joint-prefix": {"fusion": JointDecoder(image_attention="prefix"), "adapter": LinearConfig()},
    "joint-perceiver": {
        "fusion": JointDecoder(image_attention="bidirectional_image"),
        "adapter": PerceiverConfig(latents=3, heads=4),
    },
    "cross": {"fusion": CrossAttention(every=2), "adapter": MLPConfig()},
    "cross-perceiver": {"fusion": CrossAttention(every=2), "adapter": PerceiverConfig(latents=3, heads=4)},
    "mot": {"fusion": MixtureOfTransformers(), "adapter": LinearConfig()},
    "moma": {"fusion": MoMa(), "adapter": MLPConfig(), "moe": EXPERTS},
}


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tower")
    stored(folder)
    return folder


def described(tower: Path, name: str = "joint", **more: Any) -> VLM:
    keys = {**SIZES, "vocab_size": 300, "max_length": 128} | PARTS | KINDS[name] | more
    return VLM(**keys, encoder=SigLIP2(path=str(tower), patches=MOST))


def items(component: VLM, *shapes: tuple[int, int]) -> torch.Tensor:
    native = Native(PATCH, MOST, each=True)
    return torch.from_numpy(np.stack([native_item(photo(*shape), component.vision.processing, native) for shape in shapes]))


def given(component: VLM, *rows: list[Any], length: int = 64) -> dict[str, torch.Tensor]:
    """Rows of ids and sizes of images, filled up with text."""
    found, numbers, ids = [], [], []
    for row in rows:
        mine: list[int] = []
        tokens: list[int] = []
        for part in row:
            if isinstance(part, int):
                tokens.append(part)
                continue
            grid = native_grid(*part, PATCH, MOST)
            varies = component.native is not None and component.native.each
            tokens += [HOLE] * (grid[0] * grid[1] if varies else component.per_image)
            mine.append(len(found))
            found.append(part)
        ids.append([*tokens, *(2 + place % 30 for place in range(length - len(tokens)))])
        numbers.append(mine)
    most = max(map(len, numbers))
    rows_of = torch.tensor([[*mine, *[-1] * (most - len(mine))] for mine in numbers])
    return {"x": torch.tensor(ids), "images": items(component, *found).double(), "image_rows": rows_of}


@pytest.mark.parametrize("name", KINDS)
def test_padding_says_nothing(tower: Path, name: str) -> None:
    component = described(tower, name)
    model = build(component)
    one = given(component, [3, SHAPES[1], 5, SHAPES[2]], [SHAPES[3], 4, 5])
    wanted, other = model(**one), one["images"].clone()
    for image, (rows, columns) in enumerate(split_native(other)[1].tolist()):
        assert rows * columns < MOST
        other[image, rows * columns : -1] = 7.0
    assert torch.allclose(model(**{**one, "images": other}), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", KINDS)
def test_more_padding_changes_nothing(tower: Path, name: str) -> None:
    """The same images, padded further, to a model for larger ones with the same weights."""
    component = described(tower, name)
    larger = replace(component, encoder=SigLIP2(path=str(tower), patches=MOST + 7))
    one = given(component, [3, SHAPES[1], 5, SHAPES[2]], [SHAPES[3], 4, 5])
    images = one["images"]
    padded = torch.cat((images[:, :-1], images.new_zeros(len(images), 7, images.shape[2]), images[:, -1:]), 1)
    assert torch.allclose(build(larger)(**{**one, "images": padded}), build(component)(**one), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_does_not_depend_on_others_and_its_image_counts(tower: Path, name: str) -> None:
    component = described(tower, name)
    model = build(component)
    first, second = [3, SHAPES[1], 5, SHAPES[2], 6], [SHAPES[0], 4, 5]
    both = model(**given(component, first, second))
    for place, row in enumerate((first, second)):
        assert torch.allclose(model(**given(component, row))[0], both[place], rtol=0, atol=1e-10)
    changed = given(component, first, second)
    changed["images"][1, 0] += 1
    moved = (model(**changed) - both).abs().amax(-1)
    assert moved[0, -1] > 1e-9 and moved[1].max() < 1e-12


def test_vectors_are_those_of_transformers_in_the_places_of_their_patches(tower: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    component = described(tower, adapter=LinearConfig())
    model: Any = build(component)
    read = component.vision.weights().read(list(component.vision.weights().tensors))
    model.encoder.load_state_dict(read)
    theirs = transformers.Siglip2VisionModel.from_pretrained(tower).double().eval()
    images = [photo(*shape) for shape in SHAPES]
    processed = Siglip2ImageProcessorPil.from_pretrained(tower)(images=images, return_tensors="pt")
    processed["pixel_values"] = processed["pixel_values"].double()
    with torch.no_grad():
        features = theirs(**processed).last_hidden_state
        taken: list[torch.Tensor] = []
        entered = model.enter

        def enter(*args: Any) -> Any:
            found = entered(*args)
            taken.append(found[0])
            return found

        model.enter = enter
        rows = given(component, [3, SHAPES[0], 5, SHAPES[1]], [SHAPES[2], 4, SHAPES[3]])
        model(**rows)
    stream = taken[0]
    layer = model.adapter.layers["0"]
    wanted = [
        features[at, : rows_ * columns] @ layer.weight.T + layer.bias
        for at, (rows_, columns) in enumerate(processed["spatial_shapes"].tolist())
    ]
    assert torch.allclose(stream[rows["x"] == HOLE], torch.cat(wanted), atol=1e-5)
    assert torch.equal(stream[rows["x"] != HOLE], model.embed(rows["x"])[rows["x"] != HOLE])


def test_places_against_a_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        counts = torch.randint(1, 6, (5,), generator=draw)
        rows = torch.tensor([[3, 0, -1], [4, 1, 2], [-1, -1, -1]])
        ids, wanted = [], []
        for row in rows.tolist():
            tokens, places = [], []
            for image in row:
                tokens.append(7)
                places.append(-1)
                if image >= 0:
                    tokens += [9] * int(counts[image])
                    places += [image * 5 + at for at in range(int(counts[image]))]
            ids.append([*tokens, *[7] * (20 - len(tokens))])
            wanted.append([*places, *[-1] * (20 - len(places))])
        found = feature_places(torch.tensor(ids), 9, rows, 5, counts)
        assert found.tolist() == wanted


@pytest.mark.parametrize("name", KINDS)
def test_text_alone_has_gradients_of_zero(tower: Path, name: str) -> None:
    model = build(described(tower, name)).train()
    model(torch.tensor([[3, 4, 5, 6]])).square().sum().backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert not path.startswith(("encoder.", "adapter.")) or not parameter.grad.any(), path


def test_wrong_numbers_of_placeholders_are_refused(tower: Path) -> None:
    component = described(tower)
    rows = given(component, [3, SHAPES[1], 5])
    rows["x"][0, 40] = HOLE
    with pytest.raises(Misplaced, match=r"row 0 has 17 placeholders .* 1 images of a token for each patch, which need 16"):
        build(component)(**rows)
    with pytest.raises(Misplaced, match=r"row 0 has"):
        build(component)(rows["x"])


@pytest.mark.parametrize("adapter", [AveragePoolConfig(), PixelShuffleConfig(), AttentionPoolConfig(heads=2)])
def test_adapters_of_a_square_grid_are_refused(tower: Path, adapter: Any) -> None:
    with pytest.raises(ValueError, match=r"'linear', 'mlp' or 'perceiver'|square"):
        described(tower, adapter=adapter)
    wide = SigLIP2(path=str(tower), patches=16)  # a number that is a square by chance
    with pytest.raises(ValueError, match=r"'linear', 'mlp' or 'perceiver'"):
        replace(described(tower, adapter=LinearConfig()), encoder=wide, adapter=adapter)


def test_a_mask_of_whole_images_is_refused_where_they_differ(tower: Path) -> None:
    with pytest.raises(ValueError, match=r"needs the same number of tokens for every image"):
        described(tower, fusion=JointDecoder(image_attention="bidirectional_image"))
    with pytest.raises(ValueError, match=r"needs the same number of tokens for every image"):
        described(tower, "mot", fusion=MixtureOfTransformers(image_attention="bidirectional_image"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    lines = []
    for number in range(40):
        shape = SHAPES[number % len(SHAPES)]
        photo(*shape).save(folder / f"{number}.png")
        named = {} if number % 5 == 4 else {"image": f"{number}.png"}
        lines.append(json.dumps({"text": f"{number:02d} words", **named}))
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def opened(corpus: Path, model: Any, workspace: Path, **more: Any) -> Any:
    context = SourceContext(workspace, ByteTokenizer(), 64, lambda _: None, model=model)
    return ImageJsonl(path=str(corpus / "records.jsonl"), **more).build(context)


@pytest.mark.parametrize("name", ["joint", "joint-perceiver", "cross"])
def test_a_store_has_a_placeholder_for_each_patch(tower: Path, corpus: Path, tmp_path: Path, name: str) -> None:
    component = described(tower, name)
    store = opened(corpus, component, tmp_path)
    ids, begin, item = store.read(0, store.tokens), 0, 0
    assert store.item_shape == (MOST + 1, 3 * PATCH * PATCH)
    for number, end in enumerate(store.ends().tolist()):
        image = number % 5 != 4
        shape = SHAPES[number % len(SHAPES)]
        rows, columns = native_grid(*shape, PATCH, MOST)
        each = {"joint": rows * columns, "joint-perceiver": 3, "cross": 1}[name] if image else 0
        assert int((ids[begin:end] == HOLE).sum()) == each
        assert store.items_before(np.array([begin, begin + 1, end])).tolist() == [item, item + image, item + image]
        if image:
            patches, grid = native_patches(photo(*shape), component.vision.processing, PATCH, MOST)
            found = store.load(item, item + 1)[0]
            assert np.array_equal(found[:-1], patches) and found[-1, :2].tolist() == list(grid) and not found[-1, 2:].any()
            assert Image.open(BytesIO(store.picture(item))).size == shape
        begin, item = end, item + image


def test_a_source_that_cuts_squares_is_refused(tower: Path, corpus: Path, tmp_path: Path) -> None:
    for more in ({"tiling": Tiling(name="anyres")}, {"size": 16}):
        with pytest.raises(DataError, match=r"keeps their proportions; remove tiling and size"):
            opened(corpus, described(tower), tmp_path, **more)


def test_an_image_that_is_too_long_is_a_broken_record(tower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None that PIL opens is: a stand-in says so of those that are wider than high."""
    photo(40, 10).save(tmp_path / "long.png")
    photo(40, 40).save(tmp_path / "good.png")
    records = [{"text": "a", "image": "long.png"}, {"text": "b", "image": "good.png"}]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    monkeypatch.setattr(inputs, "native_grid", lambda width, height, *_: (1, 30) if width > height else (2, 2))
    with pytest.raises(DataError, match=r"long.png: .* too elongated for 20 patches; raise encoder.patches"):
        opened(tmp_path, described(tower), tmp_path / "w")
    assert opened(tmp_path, described(tower), tmp_path / "w", skip=1).facts.images == 1


def settings(tower: Path, corpus: Path, folder: Path, *more: str) -> list[str]:
    encoder = f"{{name='siglip2', path='{tower}', patches={MOST}}}"
    return [
        f"--job.dir={folder}",
        "--model.name=vlm",
        f"--model.encoder={encoder}",
        "--model.dim=16",
        "--model.heads=4",
        "--model.layers=2",
        "--model.vocab_size=300",
        "--model.max_length=64",
        "--data.tokenizer={name='bytes'}",
        f"--data.sources=[{{name='image_jsonl', path='{corpus / 'records.jsonl'}'}}]",
        "--data.sequence_length=64",
        "--data.packing=best_fit",
        "--train.max_steps=3",
        "--train.global_batch=4",
        "--train.micro_batch=1",
        "--precision.compute=fp32",
        "--schedule={name='constant', warmup=1}",
        *more,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["joint_decoder", "cross_attention"])
def test_a_run_on_two_ranks_is_that_of_one(world: World, tower: Path, corpus: Path, tmp_path: Path, fusion: str) -> None:
    """Rows have other numbers of images and patches, some none."""
    chosen = f"--model.fusion={{name='{fusion}'{', every=2' if fusion == 'cross_attention' else ''}}}"
    alone = train(Path("debug"), settings(tower, corpus, tmp_path / "one", chosen))
    both = world.run(train, 2, Path("debug"), settings(tower, corpus, tmp_path / "two", chosen, "--parallel.dp_shard=2"))
    assert len(alone["losses"]) == 3 and alone["losses"][-1] < alone["losses"][0]
    assert both[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def test_images_are_swapped_for_those_of_as_many_patches(tower: Path) -> None:
    component = described(tower)
    long, short = (90, 9), (40, 40)
    rows = given(component, [3, long], [short, 4], [5, long], [short, 6])
    batch = Batch(rows["x"], rows["x"], extras={name: rows[name] for name in ("images", "image_rows")})
    moved, labels = swap_images([batch], varies=True)
    before, after = split_native(batch.extras["images"])[1], split_native(moved[0].extras["images"])[1]
    assert native_grid(*long, PATCH, MOST) != native_grid(*short, PATCH, MOST)
    assert torch.equal(before.prod(1), after.prod(1)) and labels == rows["x"].numel()
    build(component)(moved[0].tokens, **moved[0].extras)


@pytest.mark.parametrize("name", KINDS)
def test_made_up_images_fit_the_model(tower: Path, name: str) -> None:
    component = described(tower, name)
    model = component.build()
    assert isinstance(model, VisionLanguageModel)
    tokens = torch.randint(1, 290, (6, 80), generator=torch.Generator().manual_seed(1))
    made = model.with_extras(Batch(tokens, tokens))
    assert len({*split_native(made.extras["images"])[1].prod(1).tolist()}) > 1
    assert (
        build(component)(made.tokens, **{k: v.double() if v.is_floating_point() else v for k, v in made.extras.items()})
        .isfinite()
        .all()
    )


def test_products_of_a_native_encoder_are_counted(tower: Path) -> None:
    counts = described(tower).counts()
    block = MOST * (4 * 24 * 24 + 2 * 24 * 40) + 2 * MOST * MOST * 24
    resized = MOST * 16 * 24
    assert counts.encoder == 2 * (MOST * 48 * 24 + resized + 2 * block)


def test_a_run_prepares_such_images(tower: Path, corpus: Path, tmp_path: Path) -> None:
    """With images and text in one batch, and the modalities' hook."""
    run, _ = prepared(
        Path("debug"), settings(tower, corpus, tmp_path / "run", "--hooks=[{name='modalities', every=1, batches=0}]")
    )
    fit(run)
    assert run.state.step == 3


@pytest.mark.parametrize("name", ["joint", "joint-perceiver", "cross", "moma"])
def test_rows_for_comparisons_and_inner_values(tower: Path, name: str) -> None:
    """Logits of formats are compared on text; the list of inner values needs no image."""
    component = described(tower, name)
    model = build(component).eval()
    tokens, extras = fixed_rows(component)
    assert model(tokens, **extras).isfinite().all() and not extras
    with torch.device("meta"):
        listed = taps(component.build())
    assert "blocks.0.residual_after" in listed and "modality" in listed
