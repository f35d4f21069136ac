"""Checks of every adapter: each image becomes the declared number of tokens, independently, and all parameters are described."""

from typing import Any

from forge_vlm.context import AdapterContext

IMAGES = 3
CONTEXT = AdapterContext(width=8, tokens=16, dim=12)


def check_specs(component: Any) -> None:
    """`tensor_specs()` describes every parameter of the module built on the meta device."""
    from forge_models.conformance import trial

    module = trial.on_meta(lambda: component.build(CONTEXT))
    trial.agree(module, trial.specs_of(module))


def check_tokens(component: Any) -> None:
    """The module maps (N, n, width) to (N, tokens(n), dim)."""
    adapter, x = _built(component)
    found, said = tuple(adapter(x).shape), (IMAGES, component.tokens(CONTEXT.tokens), CONTEXT.dim)
    assert found == said, f"the adapter returns the shape {found}; tokens({CONTEXT.tokens}) means {said}"


def check_no_image(component: Any) -> None:
    """An empty batch returns an empty batch, with gradients of zero, so that ranks without images run the same collectives."""
    from forge_vlm.conformance.no_image import idles

    adapter, x = _built(component)
    idles(adapter, tuple(x.shape[1:]), (component.tokens(CONTEXT.tokens), CONTEXT.dim))


def check_images(component: Any) -> None:
    """The tokens of an image do not depend on the other images of the batch."""
    import torch

    from forge_models.conformance import trial

    adapter, x = _built(component)
    with torch.no_grad():
        together = adapter(x)
        for at in range(IMAGES):
            trial.same(adapter(x[at : at + 1]), together[at : at + 1], f"image {at} alone and with others")


def check_all_features(component: Any) -> None:
    """Every feature influences the tokens."""
    import torch

    adapter, x = _built(component)
    with torch.no_grad():
        whole = adapter(x)
        for at in range(x.shape[1]):
            changed = x.clone()
            changed[:, at] += 1
            assert not torch.equal(adapter(changed), whole), f"feature {at} does not change any token"


def check_deterministic(component: Any) -> None:
    """In evaluation the same features produce the same bits."""
    from forge_models.conformance import trial

    adapter, x = _built(component)
    trial.repeats(lambda: adapter(x))


def check_gradients(component: Any) -> None:
    """Every parameter has a finite gradient."""
    from forge_models.conformance import trial

    adapter, x = _built(component)
    trial.learns(adapter, lambda: adapter(x))


def _built(component: Any) -> Any:
    from forge_models.conformance import trial

    return trial.part(lambda: component.build(CONTEXT)), trial.drawn(IMAGES, CONTEXT.tokens, CONTEXT.width)
