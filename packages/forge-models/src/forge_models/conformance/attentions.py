"""Checks of attentions: causal, separate documents, described parameters."""

from typing import Any

from forge_models.conformance.mlps import check_matrices as check_matrices
from forge_models.conformance.mlps import check_specs as check_specs

LAYERS = (0, 1)
"""Layers to check; possibly only one of them has a window."""


def check_causality(component: Any) -> None:
    """Checks (B, T, dim) -> (B, T, dim), and that each token depends on the previous token but on no later one."""
    from forge_models.conformance import trial

    for layer in LAYERS:
        attend, x = _built(component, layer)
        assert attend(x).shape == x.shape, f"shape {tuple(x.shape)} becomes {tuple(attend(x).shape)}"
        trial.causal(attend, x, trial.drawn(*x.shape, seed=8))


def check_documents(component: Any) -> None:
    """Checks that a document in a packed row has the same outputs as alone."""
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
    """Checks that the same input gives bitwise equal outputs in evaluation."""
    from forge_models.conformance import trial

    attend, x = _built(component)
    trial.repeats(lambda: attend(x))


def check_gradients(component: Any) -> None:
    """Checks that every parameter has a finite, nonzero gradient."""
    from forge_models.conformance import trial

    attend, x = _built(component)
    trial.learns(attend.module, lambda: attend(x))


class _Attend:
    """Calls an attention as a decoder does: with the rotation of its positions and the mask that its core prepares."""

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
