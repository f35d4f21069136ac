"""Products of vision-language models against torch's counter of real steps, and figures worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from forge_core.batch import Batch
from forge_core.component import Component
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.flops import count_flops, counts_of
from forge_train.hooks import metrics
from forge_train.hooks.metrics import Utilization
from forge_vlm.components.adapters import (
    AttentionPoolConfig,
    AveragePoolConfig,
    LinearConfig,
    MLPConfig,
    PerceiverConfig,
    PixelShuffleConfig,
)
from forge_vlm.components.encoders import Features, ViT
from forge_vlm.components.fusions import MixtureOfTransformers
from forge_vlm.flops import VisionCounts
from vlm.tiny import IMAGE, JOINT, MODELS, TEXT, build

PATCHES = 4 * 16 * 8
"""Multiply-adds of the projection of patches for one image: its pixels have no gradient."""


def rows(component: Any, images: int, length: int = 24, count: int = 2) -> dict[str, torch.Tensor]:
    """Each row has as many images, in the first places, then text."""
    tokens = torch.randint(2, 30, (count, length), generator=torch.Generator().manual_seed(5))
    tokens[:, : images * component.per_image] = IMAGE
    pixels = torch.randn(count * images, 1, 8, 8, dtype=torch.float64)
    return {"x": tokens, "images": pixels, "image_rows": torch.arange(count * images).view(count, images)}


def batch_of(given: dict[str, torch.Tensor]) -> Batch:
    extras = {name: given[name] for name in ("images", "image_rows") if name in given}
    return Batch(given["x"], given["x"], extras=extras)


def counted(model: Any, given: dict[str, torch.Tensor], backward: bool) -> int:
    """The fused kernel counts as 0 on a CPU; the plain one computes the full square, as the convention has it."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = model(**given)
        if backward:
            out.square().sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("moma-choice", "moma-threshold")])
@pytest.mark.parametrize("images", [1, 2])
def test_a_step_equals_torchs_counter(name: str, images: int) -> None:
    component = MODELS[name]
    model, given = build(component).train(), rows(component, images)
    counts = component.counts()
    said = counts.training(24) * 2 * 24 + counts.beyond([batch_of(given)])
    assert said - 2 * PATCHES * 2 * images == counted(model, given, backward=True)


def test_experts_that_choose_have_one_token_in_so_many() -> None:
    """Of 12 tokens of an image and 12 of text in a row each of 4 experts takes 3."""
    component = MODELS["moma-choice"]
    model, given = build(component).train(), rows(component, 3)
    counts = component.counts()
    found = counted(model, given, backward=True)
    foreseen = 2 * 3 * 4 * 16 * 48  # its inputs are detached: the product for their gradient is not made
    assert counts.training(24) * 48 + counts.beyond([batch_of(given)]) - 2 * PATCHES * 6 - foreseen == found


@pytest.mark.parametrize(
    "adapter",
    [
        LinearConfig(),
        MLPConfig(hidden=2),
        AveragePoolConfig(),
        PixelShuffleConfig(hidden=1),
        AttentionPoolConfig(heads=2),
        PerceiverConfig(latents=3, heads=4),
    ],
)
def test_every_adapter_is_counted(adapter: Any) -> None:
    component = replace(JOINT, adapter=adapter)
    model, given = build(component).eval(), rows(component, 2)
    counts = component.counts()
    forward = counts.forward(24) * 48 + (counts.encoder + counts.adapter) * 4
    assert forward == counted(model, given, backward=False)


def test_a_frozen_encoder_has_no_backward() -> None:
    component = MODELS["cross"]
    model, given = build(component).train(), rows(component, 1)
    frozen = [name for name, parameter in model.named_parameters() if name.startswith("encoder.")]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    counts = component.counts()
    into_adapter = 2 * 2 * 4 * 8 * 16  # its inputs have no gradient then
    said = counts.training(24) * 48 + counts.beyond([batch_of(given)], frozen)
    assert said - into_adapter == counted(model, given, backward=True)


def test_rows_without_images_count_as_text() -> None:
    component = MODELS["cross"]
    counts, given = component.counts(), rows(component, 1)
    one = {**given, "image_rows": torch.tensor([[0], [-1]])}
    assert 2 * counts.beyond([batch_of(one)]) == counts.beyond([batch_of(given)]) > 0
    assert counts.beyond([Batch(given["x"], given["x"])]) == 0
    assert counts.training(24) == count_flops(TEXT.shape).training(24)


def test_a_published_tower_by_hand() -> None:
    """Of ViT-L/14 at 336: 576 patches, 24 blocks of width 1024; a projection of two layers to 4096, as LLaVA-1.5 has it."""
    tower = ViT(size=336, patch=14, dim=1024, layers=24, heads=16)
    text = DecoderConfig(dim=4096, layers=1, heads=32, ffn_dim=11008, vocab_size=32064, max_length=4096)
    keys = {name: getattr(text, name) for name in ("dim", "layers", "heads", "ffn_dim", "vocab_size", "max_length")}
    counts = replace(JOINT, **{**keys, "kv_heads": None}, encoder=tower, adapter=MLPConfig()).counts()
    block = 576 * 12 * 1024**2 + 2 * 576**2 * 1024
    assert counts.encoder == 2 * (576 * 588 * 1024 + 24 * block)
    assert counts.adapter == 2 * 576 * (1024 * 4096 + 4096**2)
    assert counts.vectors == 576
    assert counts.matrix == count_flops(text.shape).matrix


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_module(name: str) -> None:
    """What a token of text does not meet: experts that it does not go to, and the weights of images."""
    model, counts = build(MODELS[name]), MODELS[name].counts()
    own = {path: parameter.numel() for path, parameter in model.named_parameters()}
    assert counts.parameters == sum(own.values())
    others = sum(size for path, size in own.items() if ".image." in path)
    experts = sum(size for path, size in own.items() if ".experts." in path and ".image." not in path)
    chosen = {"moma-choice": 1, "moma-threshold": 1}.get(name, 2)
    assert counts.parameters - counts.active == others + experts // 4 * (4 - chosen)


def test_images_that_are_tokens_or_features_need_no_encoder() -> None:
    tokens = replace(
        JOINT, images="tokens", encoder=None, adapter=None, modalities={"image": (30, 36)}, fusion=MixtureOfTransformers()
    )
    assert (tokens.counts().encoder, tokens.counts().adapter) == (0, 0)
    assert replace(JOINT, encoder=Features(count=4, dim=8)).counts().encoder == 0


def test_a_part_that_declares_nothing_gives_no_counts() -> None:
    class Other(Component):
        def build(self, context: Any) -> Any:
            return GQA().build(context)

    assert isinstance(counts_of(JOINT), VisionCounts) and counts_of(TEXT) == count_flops(TEXT.shape)
    assert counts_of(replace(JOINT, attention=Other())) is None
    assert counts_of(object()) is None


def test_speed_of_a_run_counts_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the batches of the step, and what it trains."""
    component = MODELS["joint"]
    model, given = build(component), rows(component, 2)
    run: Any = SimpleNamespace(
        job=SimpleNamespace(
            model=component,
            transforms={},
            precision=SimpleNamespace(compute="fp32"),
            data=SimpleNamespace(sequence_length=24, phases=()),
        ),
        topology=SimpleNamespace(size=2, device=torch.device("cpu")),
        state=SimpleNamespace(step=1),
        batches=[batch_of(given)],
        model=SimpleNamespace(parameters_held=model.named_parameters),
    )
    monkeypatch.setattr(metrics, "of_device", lambda *_: 1e9)
    speed, counts = Utilization.of(run), component.counts()
    images = counts.beyond(run.batches) / 48
    found = speed.now(100.0, run)
    assert found["model_tflops"] == pytest.approx(100 * (counts.training(24) + images) / 2 / 1e12)
    assert found["mfu"] == pytest.approx(100 * (counts.training(24) + images) / 2 / 1e9)
    assert found["mfu_attended"] == pytest.approx(100 * (counts.training(24, causal=True) + images) / 2 / 1e9)
    assert "MFLOP an image in front of it" in speed.line()
    model.encoder.requires_grad_(False)  # type: ignore[union-attr]
    saved = 2 * counts.encoder * 4 / 48
    assert speed.now(100.0, run)["mfu"] == pytest.approx(100 * (counts.training(24) + images - saved) / 2 / 1e9)
