"""Checks of every fusion in a small model with a native encoder: causality and independent rows."""

from typing import Any

from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_vlm.components.encoders import ViT
from forge_vlm.components.model import VLM

SIZES: dict[str, Any] = {"dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "vocab_size": 40, "max_length": 64}
LENGTH = 16


def check_specs(component: Any) -> None:
    """`specs()` of the model describes every parameter of the module built on the meta device."""
    from forge_models.conformance import trial

    module: Any = trial.on_meta(model_of(component).build)
    trial.agree(module, module.specs().tensors)


def check_feature(component: Any) -> None:
    """`feature` names the combination that must be tested in layouts."""
    assert isinstance(component.feature, str), "feature is not a string"
    assert component.feature.startswith("fusion_"), f"feature {component.feature!r} does not begin with 'fusion_'"


def check_images_count(component: Any) -> None:
    """An image changes the logits of later tokens in its row, and no other row."""
    import torch

    model, inputs = _built(component)
    with torch.no_grad():
        one = model(**inputs)
        other = model(**{**inputs, "images": inputs["images"] + torch.tensor([1.0, 0.0]).view(2, 1, 1, 1)})
    assert (one[0, -1] - other[0, -1]).abs().max() > 1e-9, "the last token of a row does not depend on its image"
    assert (one[1] - other[1]).abs().max() < 1e-10, "a row depends on the image of another row"


def check_causality(component: Any) -> None:
    """In evaluation a token depends on no later text."""
    import torch

    model, inputs = _built(component)
    changed = {**inputs, "x": inputs["x"].clone()}
    changed["x"][:, -2] = 3 + changed["x"][:, -2] % 3
    with torch.no_grad():
        one, other = model(**inputs), model(**changed)
    assert (one[:, :-2] - other[:, :-2]).abs().max() < 1e-10, "a token depends on a later one"


def check_text(component: Any) -> None:
    """Text needs no images; an unused image changes nothing."""
    import torch

    from forge_models.conformance import trial

    model, inputs = _built(component)
    text = torch.arange(2, 2 + LENGTH).expand(2, -1)
    with torch.no_grad():
        blank = model(text, images=inputs["images"][:1], image_rows=torch.full((2, 1), -1))
        trial.same(model(text), blank, "logits of text alone and with an unused image")


def check_gradients(component: Any) -> None:
    """In training every parameter has a gradient, with and without images, so that ranks run the same collectives."""
    import torch

    model, inputs = _built(component)
    model.train()
    for given in (inputs, {"x": torch.arange(2, 2 + LENGTH).expand(2, -1)}):
        model.zero_grad()
        model(**given).square().sum().backward()
        missing = sorted(name for name, parameter in model.named_parameters() if parameter.grad is None)
        assert not missing, f"no gradient for {', '.join(missing)}"


def model_of(component: Any) -> VLM:
    """Returns a small model with this fusion, with experts if the fusion needs them."""
    shape = DecoderConfig(**SIZES).shape
    encoder = ViT(size=8, patch=4, dim=8, layers=1, heads=2)
    parts = {"attention": shape.attention, "mlp": shape.mlp, "norm": shape.norm, "encoder": encoder}
    try:
        return VLM(**SIZES, **parts, fusion=component)
    except ValueError:
        return VLM(**SIZES, **parts, fusion=component, moe=MoEConfig(experts=4, kernel="loop"))


def _built(component: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the model in fp64 and evaluation mode, and inputs of two rows with one image each."""
    import torch

    from forge_models.conformance import trial

    described = model_of(component)
    module: Any = trial.on_meta(described.build)
    specs = module.specs()
    model = trial.filled(module, specs.tensors, specs.ties)
    image = [described.placeholder] * described.per_image
    rows = [[5, 6, *image, *range(7, 7 + LENGTH - 2 - len(image))], [*image, *range(8, 8 + LENGTH - len(image))]]
    images = torch.randn(2, *described.build().image_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return model, {"x": torch.tensor(rows), "images": images, "image_rows": torch.tensor([[0], [1]])}
