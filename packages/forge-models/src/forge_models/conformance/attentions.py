"""What every attention has to do: look back only, stay inside of a document, and describe its parameters."""

from typing import Any

from forge_models.conformance.mlps import check_matrices as check_matrices
from forge_models.conformance.mlps import check_specs as check_specs

LAYERS = (0, 1)
"""Both are tried: a window may be of one of them only."""


def check_causality(component: Any) -> None:
    """(B, T, dim) -> (B, T, dim); no token sees a later one, and each sees the one before it."""
    from forge_models.conformance import trial

    for layer in LAYERS:
        attend, x = _built(component, layer)
        assert attend(x).shape == x.shape, f"shape {tuple(x.shape)} becomes {tuple(attend(x).shape)}"
        trial.causal(attend, x, trial.drawn(*x.shape, seed=8))


def check_documents(component: Any) -> None:
    """In a packed row a document has the outputs that it has alone."""
    import torch

    from forge_models.conformance import trial

    for layer in LAYERS:
        attend, x = _built(component, layer)
        with torch.no_grad():
            cut = 5
            documents = (torch.arange(x.shape[1]) >= cut).int().expand(x.shape[:2])
            positions = torch.arange(x.shape[1]).where(documents[0] == 0, torch.arange(x.shape[1]) - cut)
            packed = attend(x, positions.expand(x.shape[:2]), documents)
            trial.same(packed[:, :cut], attend(x[:, :cut]), "the first document of a row sees another")
            trial.same(packed[:, cut:], attend(x[:, cut:]), "the second document of a row sees another")


def check_deterministic(component: Any) -> None:
    """In evaluation the same input gives the same bits."""
    from forge_models.conformance import trial

    attend, x = _built(component)
    trial.repeats(lambda: attend(x))


def check_gradients(component: Any) -> None:
    """Every parameter gets a gradient, and it is finite."""
    from forge_models.conformance import trial

    attend, x = _built(component)
    trial.learns(attend.module, lambda: attend(x))


class _Attend:
    """An attention with what a decoder gives it: the rotation of its positions, and what its core prepares."""

    def __init__(self, module: Any, context: Any) -> None:
        self.module, self.context = module, context

    def __call__(self, x: Any, positions: Any = None, documents: Any = None) -> Any:
        import torch

        from forge_models.blocks.rope import Rotary

        positions = torch.arange(x.shape[1]) if positions is None else positions
        rotary = getattr(self.module, "rotary", None) or Rotary(self.context.head_dim, self.context.rope)
        core = getattr(self.module, "core", None)
        window = getattr(self.module, "window", None)
        mask = None if core is None else core.prepare(documents, x.shape[1], window, x.device)
        return self.module(x, rotary(positions, documents), mask, None)


def _built(component: Any, layer: int = 0) -> Any:
    from forge_models.conformance import trial

    context = trial.context(component, layer)
    return _Attend(trial.part(lambda: component.build(context)), context), trial.drawn(trial.ROWS, trial.LENGTH, trial.DIM)
