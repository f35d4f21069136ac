"""Checks of norms: they normalize only the last dimension, and keep the dtype."""

from typing import Any


def check_specs(component: Any) -> None:
    """Checks that `tensor_specs()` describes every parameter of the module, built on the meta device."""
    from forge_models.conformance import trial

    module = trial.on_meta(lambda: component.build(trial.DIM))
    trial.agree(module, trial.specs_of(module))


def check_rows(component: Any) -> None:
    """Checks (..., dim) -> (..., dim), and that each vector is independent of the others."""
    from forge_models.conformance import trial

    norm, x = trial.part(lambda: component.build(trial.DIM)), trial.drawn(trial.ROWS, trial.LENGTH, trial.DIM)
    assert norm(x).shape == x.shape, f"shape {tuple(x.shape)} becomes {tuple(norm(x).shape)}"
    trial.each_by_itself(norm, x)
    trial.same(norm(x[0, 0]), norm(x)[0, 0], "a vector alone and in its batch")


def check_dtype(component: Any) -> None:
    """Checks that outputs have the dtype of the inputs, even if parameters are wider, and equal those in fp64 up to rounding."""
    import torch

    from forge_models.conformance import trial

    norm, x = trial.part(lambda: component.build(trial.DIM)), trial.drawn(trial.ROWS, trial.LENGTH, trial.DIM)
    exact = norm(x.bfloat16().double()).detach()
    low = norm.float()(x.bfloat16()).detach()
    assert low.dtype == torch.bfloat16, f"bfloat16 becomes {low.dtype}"
    error = float((low.double() - exact).abs().max() / exact.abs().max())
    assert error <= 2**-8, f"bfloat16 is off by {error:.1e}: statistics belong in fp32, and the result is rounded once"


def check_deterministic(component: Any) -> None:
    """Checks that the same input gives bitwise equal outputs."""
    from forge_models.conformance import trial

    norm, x = trial.part(lambda: component.build(trial.DIM)), trial.drawn(trial.ROWS, trial.LENGTH, trial.DIM)
    trial.repeats(lambda: norm(x))


def check_gradients(component: Any) -> None:
    """Checks that every parameter has a finite, nonzero gradient."""
    from forge_models.conformance import trial

    norm, x = trial.part(lambda: component.build(trial.DIM)), trial.drawn(trial.ROWS, trial.LENGTH, trial.DIM)
    trial.learns(norm, lambda: norm(x))
