"""Checks of the vision parts of a model, encoders, adapters and fusions, and of scorers of frames."""

from typing import Any

import torch

from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_testing import modules
from forge_vlm.components.encoders import ViT
from forge_vlm.components.model import VLM
from forge_vlm.context import AdapterContext
from forge_vlm.data.example_images import CHECKED_FRAMES, CHECKED_QUESTION

IMAGES = 3


def _check_alone(module: Any, images: Any) -> None:
    """Checks that the output for each image (1, ...) equals that of the same image in the batch (IMAGES, ...)."""
    with torch.no_grad():
        together = module(images)
        for at in range(IMAGES):
            modules.same(module(images[at : at + 1]), together[at : at + 1], f"image {at} alone and with others")


class EncoderChecks:
    """Checks of every encoder: each image becomes the declared features, independently, and all parameters are described."""

    @staticmethod
    def check_specs(component: Any) -> None:
        """Checks that `tensor_specs()` describes every parameter of the meta module, and that `blocks` names modules of it."""
        module: Any = modules.on_meta(component.build)
        modules.agree(module, modules.specs_of(module))
        paths = {path for path, _ in module.named_modules()}
        unknown = sorted(set(module.blocks) - paths)
        assert not unknown, f"blocks names modules that do not exist: {', '.join(unknown)}"

    @staticmethod
    def check_features(component: Any) -> None:
        """Checks that the module maps images (N, *input_shape) to features (N, tokens, width)."""
        encoder, images = _built(component)
        found, said = tuple(encoder(images).shape), (IMAGES, component.tokens, component.width)
        assert found == said, f"the encoder returns the shape {found}; tokens and width mean {said}"

    @staticmethod
    def check_no_image(component: Any) -> None:
        """Checks that an empty batch (0, *input_shape) returns (0, tokens, width), with gradients of zero: all ranks run the
        same collectives."""
        encoder, _ = _built(component)
        modules.idles(encoder, component.input_shape, (component.tokens, component.width))

    @staticmethod
    def check_statistics(component: Any) -> None:
        """Checks that `mean` and `std` have one number per channel."""
        counts = len(component.mean), len(component.std)
        assert counts == (component.channels,) * 2, f"mean and std have {counts} numbers for {component.channels} channels"

    @staticmethod
    def check_images(component: Any) -> None:
        """Checks that the features of an image do not depend on the other images of the batch."""
        encoder, images = _built(component)
        _check_alone(encoder, images)

    @staticmethod
    def check_weights(component: Any) -> None:
        """Checks that `weights()`, if defined, has the tensors of the module under their names, with their shapes."""
        if not hasattr(component, "weights"):
            return
        stored = component.weights()
        module = modules.on_meta(component.build)
        built = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        said = {name: entry.shape for name, entry in stored.tensors.items()}
        assert said == built, f"weights() has {said}, but the module has {built}"
        read = stored.read(list(stored.tensors))
        assert {name: tuple(tensor.shape) for name, tensor in read.items()} == built, "weights() reads other shapes than declared"
        for name, shape in built.items():
            half = [(size + 1) // 2 for size in shape]
            offset = [size - part for size, part in zip(shape, half, strict=True)]
            box = stored.box(name, offset, half)
            within = tuple(slice(at, at + size) for at, size in zip(offset, half, strict=True))
            assert box.equal(read[name][within]), f"weights() reads other values for a box of {name} than for the whole tensor"

    @staticmethod
    def check_deterministic(component: Any) -> None:
        """Checks that in evaluation the same images produce the same bits."""
        encoder, images = _built(component)
        modules.repeats(lambda: encoder(images))

    @staticmethod
    def check_gradients(component: Any) -> None:
        """Checks that every parameter has a finite gradient."""
        encoder, images = _built(component)
        if any(True for _ in encoder.parameters()):
            modules.learns(encoder, lambda: encoder(images))


def _built(component: Any) -> Any:
    return modules.part(component.build), modules.drawn(IMAGES, *component.input_shape)


CONTEXT = AdapterContext(width=8, tokens=16, dim=12)


class AdapterChecks:
    """Checks of every adapter: each image becomes the declared number of tokens, independently, and parameters are described."""

    @staticmethod
    def check_specs(component: Any) -> None:
        """Checks that `tensor_specs()` describes every parameter of the module built on the meta device."""
        module = modules.on_meta(lambda: component.build(CONTEXT))
        modules.agree(module, modules.specs_of(module))

    @staticmethod
    def check_tokens(component: Any) -> None:
        """Checks that the module maps (N, n, width) to (N, tokens(n), dim)."""
        adapter, x = _built_adapter(component)
        found, said = tuple(adapter(x).shape), (IMAGES, component.tokens(CONTEXT.tokens), CONTEXT.dim)
        assert found == said, f"the adapter returns the shape {found}; tokens({CONTEXT.tokens}) means {said}"

    @staticmethod
    def check_no_image(component: Any) -> None:
        """Checks that an empty batch returns an empty batch, with gradients of zero: all ranks run the same collectives."""
        adapter, x = _built_adapter(component)
        modules.idles(adapter, tuple(x.shape[1:]), (component.tokens(CONTEXT.tokens), CONTEXT.dim))

    @staticmethod
    def check_images(component: Any) -> None:
        """Checks that the tokens of an image do not depend on the other images of the batch."""
        adapter, x = _built_adapter(component)
        _check_alone(adapter, x)

    @staticmethod
    def check_all_features(component: Any) -> None:
        """Checks that every feature influences the tokens."""
        adapter, x = _built_adapter(component)
        with torch.no_grad():
            whole = adapter(x)
            for at in range(x.shape[1]):
                changed = x.clone()
                changed[:, at] += 1
                assert not torch.equal(adapter(changed), whole), f"feature {at} does not change any token"

    @staticmethod
    def check_deterministic(component: Any) -> None:
        """Checks that in evaluation the same features produce the same bits."""
        adapter, x = _built_adapter(component)
        modules.repeats(lambda: adapter(x))

    @staticmethod
    def check_gradients(component: Any) -> None:
        """Checks that every parameter has a finite gradient."""
        adapter, x = _built_adapter(component)
        modules.learns(adapter, lambda: adapter(x))


def _built_adapter(component: Any) -> Any:
    return modules.part(lambda: component.build(CONTEXT)), modules.drawn(IMAGES, CONTEXT.tokens, CONTEXT.width)


class FrameScorerChecks:
    """Checks of every scorer of frames: one score and one vector for each frame, independent of the other frames."""

    @staticmethod
    def check_shapes(component: Any) -> None:
        """Checks that scores are (frames,) and features (frames, width), all finite."""
        scores, features = component.build()(CHECKED_FRAMES, CHECKED_QUESTION)
        count = len(CHECKED_FRAMES)
        assert scores.shape == (count,), f"{count} frames have scores of shape {scores.shape}"
        assert features.ndim == 2 and len(features) == count, f"{count} frames have features of shape {features.shape}"
        assert bool(torch.as_tensor(scores).isfinite().all()), "a score is not finite"
        assert bool(torch.as_tensor(features).isfinite().all()), "a feature is not finite"

    @staticmethod
    def check_frames(component: Any) -> None:
        """Checks that the score of a frame does not depend on the other frames or on their order."""
        scorer = component.build()
        together = torch.as_tensor(scorer(CHECKED_FRAMES, CHECKED_QUESTION).scores).double()
        back = torch.as_tensor(scorer(CHECKED_FRAMES[::-1], CHECKED_QUESTION).scores).double().flip(0)
        apart = [torch.as_tensor(scorer([frame], CHECKED_QUESTION).scores).double() for frame in CHECKED_FRAMES]
        for other, what in ((back, "in reverse order"), (torch.cat(apart), "alone")):
            error = float((together - other).abs().max())
            assert error < 1e-5, f"scores of frames {what} differ by {error:.1e}"

    @staticmethod
    def check_deterministic(component: Any) -> None:
        """Checks that two scorers of one component have the same identity and the same scores."""
        first, second = component.build(), component.build()
        assert first.identity == second.identity, "two scorers of one component have different identities"
        one, other = (torch.as_tensor(scorer(CHECKED_FRAMES, CHECKED_QUESTION).scores) for scorer in (first, second))
        assert torch.equal(one, other), "two scorers of one component give other scores"


LENGTH = 16


class FusionChecks:
    """Checks of every fusion in a small model with a native encoder: causality and independent rows."""

    @staticmethod
    def check_specs(component: Any) -> None:
        """Checks that `specs()` of the model describes every parameter of the module built on the meta device."""
        module: Any = modules.on_meta(model_of(component).build)
        modules.agree(module, module.specs().tensors)

    @staticmethod
    def check_feature(component: Any) -> None:
        """Checks that `feature` names the combination that must be tested in layouts."""
        assert isinstance(component.feature, str), "feature is not a string"
        assert component.feature.startswith("fusion_"), f"feature {component.feature!r} does not begin with 'fusion_'"

    @staticmethod
    def check_images_count(component: Any) -> None:
        """Checks that an image changes the logits of later tokens in its row, and no other row."""
        model, inputs = _built_fusion(component)
        with torch.no_grad():
            one = model(**inputs)
            other = model(**{**inputs, "images": inputs["images"] + torch.tensor([1.0, 0.0]).view(2, 1, 1, 1)})
        assert (one[0, -1] - other[0, -1]).abs().max() > 1e-9, "the last token of a row does not depend on its image"
        assert (one[1] - other[1]).abs().max() < 1e-10, "a row depends on the image of another row"

    @staticmethod
    def check_causality(component: Any) -> None:
        """Checks that in evaluation a token depends on no later text."""
        model, inputs = _built_fusion(component)
        changed = {**inputs, "x": inputs["x"].clone()}
        changed["x"][:, -2] = 3 + changed["x"][:, -2] % 3
        with torch.no_grad():
            one, other = model(**inputs), model(**changed)
        assert (one[:, :-2] - other[:, :-2]).abs().max() < 1e-10, "a token depends on a later one"

    @staticmethod
    def check_text(component: Any) -> None:
        """Checks that text needs no images, and that an unused image changes nothing."""
        model, inputs = _built_fusion(component)
        text = torch.arange(2, 2 + LENGTH).expand(2, -1)
        with torch.no_grad():
            blank = model(text, images=inputs["images"][:1], image_rows=torch.full((2, 1), -1))
            modules.same(model(text), blank, "logits of text alone and with an unused image")

    @staticmethod
    def check_gradients(component: Any) -> None:
        """Checks that every parameter has a gradient in training, with and without images: ranks run the same collectives."""
        model, inputs = _built_fusion(component)
        model.train()
        for given in (inputs, {"x": torch.arange(2, 2 + LENGTH).expand(2, -1)}):
            model.zero_grad()
            model(**given).square().sum().backward()
            missing = sorted(name for name, parameter in model.named_parameters() if parameter.grad is None)
            assert not missing, f"no gradient for {', '.join(missing)}"


SIZES: dict[str, Any] = {"dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "vocab_size": 40, "max_length": 64}


def model_of(component: Any) -> VLM:
    """Returns a small model with this fusion, with experts if the fusion needs them."""
    shape = DecoderConfig(**SIZES).shape
    encoder = ViT(size=8, patch=4, dim=8, layers=1, heads=2)
    parts = {"attention": shape.attention, "mlp": shape.mlp, "norm": shape.norm, "encoder": encoder}
    try:
        return VLM(**SIZES, **parts, fusion=component)
    except ValueError:
        return VLM(**SIZES, **parts, fusion=component, moe=MoEConfig(experts=4, kernel="loop"))


def _built_fusion(component: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the model in fp64 and evaluation mode, and inputs of two rows with one image each."""
    described = model_of(component)
    module: Any = modules.on_meta(described.build)
    specs = module.specs()
    model = modules.filled(module, specs.tensors, specs.ties)
    image = [described.placeholder] * described.per_image
    rows = [[5, 6, *image, *range(7, 7 + LENGTH - 2 - len(image))], [*image, *range(8, 8 + LENGTH - len(image))]]
    images = torch.randn(2, *described.build().image_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return model, {"x": torch.tensor(rows), "images": images, "image_rows": torch.tensor([[0], [1]])}
