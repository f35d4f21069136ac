"""Checks of every encoder: each image becomes the declared features, independently, and all parameters are described."""

from typing import Any

IMAGES = 3


def check_specs(component: Any) -> None:
    """`tensor_specs()` describes every parameter of the module built on the meta device; `blocks` names modules of it."""
    from forge_models.conformance import trial

    module: Any = trial.on_meta(component.build)
    trial.agree(module, trial.specs_of(module))
    paths = {path for path, _ in module.named_modules()}
    unknown = sorted(set(module.blocks) - paths)
    assert not unknown, f"blocks names modules that do not exist: {', '.join(unknown)}"


def check_features(component: Any) -> None:
    """The module maps images (N, *input_shape) to features (N, tokens, width)."""
    encoder, images = _built(component)
    found, said = tuple(encoder(images).shape), (IMAGES, component.tokens, component.width)
    assert found == said, f"the encoder returns the shape {found}; tokens and width mean {said}"


def check_no_image(component: Any) -> None:
    """An empty batch (0, *input_shape) returns (0, tokens, width), with gradients of zero, so that ranks without images run the
    same collectives."""
    from forge_vlm.conformance.no_image import idles

    encoder, _ = _built(component)
    idles(encoder, component.input_shape, (component.tokens, component.width))


def check_statistics(component: Any) -> None:
    """`mean` and `std` have one number per channel."""
    counts = len(component.mean), len(component.std)
    assert counts == (component.channels,) * 2, f"mean and std have {counts} numbers for {component.channels} channels"


def check_images(component: Any) -> None:
    """The features of an image do not depend on the other images of the batch."""
    import torch

    from forge_models.conformance import trial

    encoder, images = _built(component)
    with torch.no_grad():
        together = encoder(images)
        for at in range(IMAGES):
            trial.same(encoder(images[at : at + 1]), together[at : at + 1], f"image {at} alone and with others")


def check_weights(component: Any) -> None:
    """`weights()`, if defined, has the tensors of the module under their names, with their shapes."""
    from forge_models.conformance import trial

    if not hasattr(component, "weights"):
        return
    stored = component.weights()
    module = trial.on_meta(component.build)
    built = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    said = {name: entry.shape for name, entry in stored.tensors.items()}
    assert said == built, f"weights() has {said}, but the module has {built}"
    read = stored.read(list(stored.tensors))
    assert {name: tuple(tensor.shape) for name, tensor in read.items()} == built, "weights() reads other shapes than it declares"
    for name, shape in built.items():
        half = [(size + 1) // 2 for size in shape]
        offset = [size - part for size, part in zip(shape, half, strict=True)]
        box = stored.box(name, offset, half)
        within = tuple(slice(at, at + size) for at, size in zip(offset, half, strict=True))
        assert box.equal(read[name][within]), f"weights() reads other values for a box of {name} than for the whole tensor"


def check_deterministic(component: Any) -> None:
    """In evaluation the same images produce the same bits."""
    from forge_models.conformance import trial

    encoder, images = _built(component)
    trial.repeats(lambda: encoder(images))


def check_gradients(component: Any) -> None:
    """Every parameter has a finite gradient."""
    from forge_models.conformance import trial

    encoder, images = _built(component)
    if any(True for _ in encoder.parameters()):
        trial.learns(encoder, lambda: encoder(images))


def _built(component: Any) -> Any:
    from forge_models.conformance import trial

    return trial.part(component.build), trial.drawn(IMAGES, *component.input_shape)
