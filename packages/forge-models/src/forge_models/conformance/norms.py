"""What every norm has to do: work on the last dimension alone, and keep the dtype."""

from typing import Any


def check_specs(component: Any) -> None:
    """`tensor_specs()` describes every parameter of what is built on the meta device."""
    from forge_models.conformance import trial

    module = trial.on_meta(lambda: component.build(trial.DIM))
    trial.agree(module, trial.specs_of(module))


def check_rows(component: Any) -> None:
    """(..., dim) -> (..., dim), each vector by itself."""
    from forge_models.conformance import trial

    norm, x = trial.part(lambda: component.build(trial.DIM)), trial.drawn(trial.ROWS, trial.LENGTH, trial.DIM)
    assert norm(x).shape == x.shape, f"shape {tuple(x.shape)} becomes {tuple(norm(x).shape)}"
    trial.each_by_itself(norm, x)
    trial.same(norm(x[0, 0]), norm(x)[0, 0], "a vector alone and in its batch")


def check_dtype(component: Any) -> None:
    """Outputs have the dtype of the inputs, also where parameters are wider; values are those of fp64 but for rounding."""
    import torch

    from forge_models.conformance import trial

    norm, x = trial.part(lambda: component.build(trial.DIM)), trial.drawn(trial.ROWS, trial.LENGTH, trial.DIM)
    exact = norm(x.bfloat16().double()).detach()
    low = norm.float()(x.bfloat16()).detach()
    assert low.dtype == torch.bfloat16, f"bfloat16 becomes {low.dtype}"
    error = float((low.double() - exact).abs().max() / exact.abs().max())
    assert error <= 2**-8, f"bfloat16 is off by {error:.1e}: statistics belong in fp32, and the result is rounded once"


def check_deterministic(component: Any) -> None:
    """The same input gives the same bits."""
    from forge_models.conformance import trial

    norm, x = trial.part(lambda: component.build(trial.DIM)), trial.drawn(trial.ROWS, trial.LENGTH, trial.DIM)
    trial.repeats(lambda: norm(x))


def check_gradients(component: Any) -> None:
    """Every parameter gets a gradient, and it is finite."""
    from forge_models.conformance import trial

    norm, x = trial.part(lambda: component.build(trial.DIM)), trial.drawn(trial.ROWS, trial.LENGTH, trial.DIM)
    trial.learns(norm, lambda: norm(x))
