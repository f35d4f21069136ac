"""Checks of feed-forward layers: independent tokens, described parameters."""

from typing import Any


def check_specs(component: Any) -> None:
    """Checks that `tensor_specs()` describes every parameter of the module, built on the meta device."""
    from forge_models.conformance import trial

    module = trial.on_meta(lambda: component.build(trial.context(component)))
    trial.agree(module, trial.specs_of(module))


def check_matrices(component: Any) -> None:
    """Checks that `matrices(context)`, if defined, lists the linear layers with the shapes and dimensions of the module."""
    from forge_models.conformance import trial

    if not hasattr(component, "matrices"):
        return
    context = trial.context(component)
    module = trial.on_meta(lambda: component.build(context))
    tensors, specs = dict(module.named_parameters()), trial.specs_of(module)
    built = {
        name.removesuffix(".weight"): (tuple(tensors[name].shape), specs[name].dims)
        for name in specs
        if specs[name].group == "matrix"
    }
    said = {name: (matrix.shape, matrix.dims) for name, matrix in component.matrices(context).items()}
    assert said == built, f"matrices(context) says {said}, but built are {built}"


def check_tokens(component: Any) -> None:
    """Checks (B, T, dim) -> (B, T, dim), and that each token is independent of the others."""
    from forge_models.conformance import trial

    mlp, x = _built(component)
    assert mlp(x).shape == x.shape, f"shape {tuple(x.shape)} becomes {tuple(mlp(x).shape)}"
    trial.each_by_itself(mlp, x)


def check_deterministic(component: Any) -> None:
    """Checks that the same input gives bitwise equal outputs in evaluation."""
    from forge_models.conformance import trial

    mlp, x = _built(component)
    trial.repeats(lambda: mlp(x))


def check_gradients(component: Any) -> None:
    """Checks that every parameter has a finite, nonzero gradient."""
    from forge_models.conformance import trial

    mlp, x = _built(component)
    trial.learns(mlp, lambda: mlp(x))


def _built(component: Any) -> Any:
    from forge_models.conformance import trial

    return trial.part(lambda: component.build(trial.context(component))), trial.drawn(trial.ROWS, trial.LENGTH, trial.DIM)
