"""What every adapter has to do: make as many tokens as it says of each image by itself, and describe its parameters."""

from typing import Any

from forge_vlm.context import AdapterContext

IMAGES = 3
CONTEXT = AdapterContext(width=8, tokens=16, dim=12)


def check_specs(component: Any) -> None:
    """`tensor_specs()` describes every parameter of what is built on the meta device."""
    from forge_models.conformance import trial

    module = trial.on_meta(lambda: component.build(CONTEXT))
    trial.agree(module, trial.specs_of(module))


def check_tokens(component: Any) -> None:
    """(N, n, width) -> (N, tokens(n), dim), as the component says."""
    adapter, x = _built(component)
    found, said = tuple(adapter(x).shape), (IMAGES, component.tokens(CONTEXT.tokens), CONTEXT.dim)
    assert found == said, f"tokens have the shape {found}, and tokens({CONTEXT.tokens}) means {said}"


def check_no_image(component: Any) -> None:
    """An empty batch gives an empty one, and gradients of zero: so a rank without images exchanges what others do."""
    from forge_vlm.conformance.no_image import idles

    adapter, x = _built(component)
    idles(adapter, tuple(x.shape[1:]), (component.tokens(CONTEXT.tokens), CONTEXT.dim))


def check_images(component: Any) -> None:
    """An image has the tokens that it has alone, also when others come with it."""
    import torch

    from forge_models.conformance import trial

    adapter, x = _built(component)
    with torch.no_grad():
        together = adapter(x)
        for at in range(IMAGES):
            trial.same(adapter(x[at : at + 1]), together[at : at + 1], f"image {at} alone and with others")


def check_all_features(component: Any) -> None:
    """Every feature has a say: none is dropped."""
    import torch

    adapter, x = _built(component)
    with torch.no_grad():
        whole = adapter(x)
        for at in range(x.shape[1]):
            changed = x.clone()
            changed[:, at] += 1
            assert not torch.equal(adapter(changed), whole), f"feature {at} changes no token"


def check_deterministic(component: Any) -> None:
    """In evaluation the same features give the same bits."""
    from forge_models.conformance import trial

    adapter, x = _built(component)
    trial.repeats(lambda: adapter(x))


def check_gradients(component: Any) -> None:
    """Every parameter gets a gradient, and it is finite."""
    from forge_models.conformance import trial

    adapter, x = _built(component)
    trial.learns(adapter, lambda: adapter(x))


def _built(component: Any) -> Any:
    from forge_models.conformance import trial

    return trial.part(lambda: component.build(CONTEXT)), trial.drawn(IMAGES, CONTEXT.tokens, CONTEXT.width)
