"""Checks of the parts of a block: attention, feed-forward layers, norms and routers."""

from typing import Any

import torch

from forge_models.shape import RouterContext
from forge_testing import modules


class MLPChecks:
    """Checks of feed-forward layers: independent tokens, described parameters."""

    @staticmethod
    def check_specs(component: Any) -> None:
        """Checks that `tensor_specs()` describes every parameter of the module, built on the meta device."""
        module = modules.on_meta(lambda: component.build(modules.context(component)))
        modules.agree(module, modules.specs_of(module))

    @staticmethod
    def check_matrices(component: Any) -> None:
        """Checks that `matrices(context)`, if defined, lists the linear layers with the shapes and dimensions of the module."""
        if not hasattr(component, "matrices"):
            return
        context = modules.context(component)
        module = modules.on_meta(lambda: component.build(context))
        tensors, specs = dict(module.named_parameters()), modules.specs_of(module)
        said = {name: (matrix.shape, matrix.dims) for name, matrix in component.matrices(context).items()}
        built = {
            name.removesuffix(".weight"): (tuple(tensors[name].shape), specs[name].dims)
            for name in specs  # other matrices, such as gates, are no layers
            if specs[name].group == "matrix" and (name.endswith(".weight") or name in said)
        }
        assert said == built, f"matrices(context) says {said}, but built are {built}"

    @staticmethod
    def check_tokens(component: Any) -> None:
        """Checks (B, T, dim) -> (B, T, dim), and that each token is independent of the others."""
        mlp, x = _built(component)
        assert mlp(x).shape == x.shape, f"shape {tuple(x.shape)} becomes {tuple(mlp(x).shape)}"
        modules.each_by_itself(mlp, x)

    @staticmethod
    def check_deterministic(component: Any) -> None:
        """Checks that the same input gives bitwise equal outputs in evaluation."""
        mlp, x = _built(component)
        modules.repeats(lambda: mlp(x))

    @staticmethod
    def check_gradients(component: Any) -> None:
        """Checks that every parameter has a finite, nonzero gradient."""
        mlp, x = _built(component)
        modules.learns(mlp, lambda: mlp(x))


def _built(component: Any) -> Any:
    return modules.part(lambda: component.build(modules.context(component))), modules.drawn(
        modules.ROWS, modules.LENGTH, modules.DIM
    )


LAYERS = (0, 1)
"""Layers to check; possibly only one of them has a window."""


class AttentionChecks:
    """Checks of attentions: causal, separate documents, described parameters."""

    check_specs = MLPChecks.check_specs
    check_matrices = MLPChecks.check_matrices

    @staticmethod
    def check_causality(component: Any) -> None:
        """Checks (B, T, dim) -> (B, T, dim), and that each token depends on the previous token but on no later one, or on all if
        the component says `causal = False`."""
        for layer in LAYERS:
            attend, x = _built_attention(component, layer)
            assert attend(x).shape == x.shape, f"shape {tuple(x.shape)} becomes {tuple(attend(x).shape)}"
            check = modules.causal if getattr(component, "causal", True) else modules.bidirectional
            check(attend, x, modules.drawn(*x.shape, seed=8))

    @staticmethod
    def check_documents(component: Any) -> None:
        """Checks that a document in a packed row has the same outputs as alone."""
        for layer in LAYERS:
            attend, x = _built_attention(component, layer)
            with torch.no_grad():
                cut = 5
                documents = (torch.arange(x.shape[1]) >= cut).int().expand(x.shape[:2])
                positions = torch.arange(x.shape[1]).where(documents[0] == 0, torch.arange(x.shape[1]) - cut)
                packed = attend(x, positions.expand(x.shape[:2]), documents)
                modules.same(packed[:, :cut], attend(x[:, :cut]), "the first document of a row sees another")
                modules.same(packed[:, cut:], attend(x[:, cut:]), "the second document of a row sees another")

    @staticmethod
    def check_deterministic(component: Any) -> None:
        """Checks that the same input gives bitwise equal outputs in evaluation."""
        attend, x = _built_attention(component)
        modules.repeats(lambda: attend(x))

    @staticmethod
    def check_gradients(component: Any) -> None:
        """Checks that every parameter has a finite, nonzero gradient."""
        attend, x = _built_attention(component)
        attend.module.train()  # an indexer has a loss of its own, in training only
        modules.learns(attend.module, lambda: attend(x))


def _built_attention(component: Any, layer: int = 0) -> Any:
    context = modules.context(component, layer)
    return _Attend(modules.part(lambda: component.build(context)), context), modules.drawn(
        modules.ROWS, modules.LENGTH, modules.DIM
    )


class _Attend:
    """Calls an attention as a decoder does: with the rotation of its positions and the mask that its core prepares."""

    def __init__(self, module: Any, context: Any) -> None:
        self.module, self.context = module, context

    def __call__(self, x: Any, positions: Any = None, documents: Any = None) -> Any:
        from forge_models.blocks.rope import Rotary

        positions = torch.arange(x.shape[1]) if positions is None else positions
        rotary = getattr(self.module, "rotary", None) or Rotary(self.context.head_dim, self.context.rope)
        core = getattr(self.module, "core", None)
        window = getattr(self.module, "window", None)
        mask = None if core is None else core.prepare(documents, x.shape[1], window, x.device)
        ids = (1000 * x[..., 0].abs()).long() % self.context.vocab_size  # one token has the same id in every row
        more = (ids,) if "tokens" in getattr(self.module, "reads", ()) else ()
        found = self.module(x, rotary(positions, documents), mask, None, *more)
        return found[0] if isinstance(found, tuple) else found  # an attention with an indexer also returns statistics


class NormChecks:
    """Checks of norms: they normalize only the last dimension, and keep the dtype."""

    @staticmethod
    def check_specs(component: Any) -> None:
        """Checks that `tensor_specs()` describes every parameter of the module, built on the meta device."""
        module = modules.on_meta(lambda: component.build(modules.DIM))
        modules.agree(module, modules.specs_of(module))

    @staticmethod
    def check_rows(component: Any) -> None:
        """Checks (..., dim) -> (..., dim), and that each vector is independent of the others."""
        norm, x = modules.part(lambda: component.build(modules.DIM)), modules.rows()
        assert norm(x).shape == x.shape, f"shape {tuple(x.shape)} becomes {tuple(norm(x).shape)}"
        modules.each_by_itself(norm, x)
        modules.same(norm(x[0, 0]), norm(x)[0, 0], "a vector alone and in its batch")

    @staticmethod
    def check_dtype(component: Any) -> None:
        """Checks that outputs have the dtype of the inputs, even if parameters are wider, and equal those in fp64."""
        norm, x = modules.part(lambda: component.build(modules.DIM)), modules.rows()
        exact = norm(x.bfloat16().double()).detach()
        low = norm.float()(x.bfloat16()).detach()
        assert low.dtype == torch.bfloat16, f"bfloat16 becomes {low.dtype}"
        error = float((low.double() - exact).abs().max() / exact.abs().max())
        assert error <= 2**-8, f"bfloat16 is off by {error:.1e}: statistics belong in fp32, and the result is rounded once"

    @staticmethod
    def check_deterministic(component: Any) -> None:
        """Checks that the same input gives bitwise equal outputs."""
        norm, x = modules.part(lambda: component.build(modules.DIM)), modules.rows()
        modules.repeats(lambda: norm(x))

    @staticmethod
    def check_gradients(component: Any) -> None:
        """Checks that every parameter has a finite, nonzero gradient, and the input too."""
        norm, x = modules.part(lambda: component.build(modules.DIM)), modules.rows().requires_grad_()
        modules.learns(norm, lambda: norm(x))
        assert x.grad is not None and bool(x.grad.isfinite().all()) and bool(x.grad.any()), "no gradient reaches the input"


CONTEXT = RouterContext(dim=16, experts=8, top_k=3, layer=1, init_std=0.02, vocab_size=200)
TOKENS = 24
UPDATES = 200


class RouterChecks:
    """Checks of routers: different experts per token, independent tokens, weights with the declared sum."""

    @staticmethod
    def check_specs(component: Any) -> None:
        """Checks that `tensor_specs()` describes every parameter and buffer of the module, built on the meta device."""
        module = modules.on_meta(lambda: component.build(CONTEXT))
        modules.agree(module, modules.specs_of(module))

    @staticmethod
    def check_choice(component: Any) -> None:
        """Checks `experts` (N, top_k) int64: in range, all different for a token, and independent of other tokens."""
        router, x, ids = _built_router(component)
        chosen, weights = router(x, ids)[:2]
        shape = (TOKENS, CONTEXT.top_k)
        assert tuple(chosen.shape) == shape, f"experts have shape {tuple(chosen.shape)}, not (N, top_k) = {shape}"
        assert tuple(weights.shape) == shape, f"weights have shape {tuple(weights.shape)}, not (N, top_k) = {shape}"
        assert chosen.dtype == torch.int64, f"experts are {chosen.dtype}, not int64"
        assert int(chosen.min()) >= 0 and int(chosen.max()) < CONTEXT.experts, f"experts not all in 0 to {CONTEXT.experts - 1}"
        twice = [row for row in chosen.tolist() if len(set(row)) < len(row)]
        assert not twice, f"a token chooses an expert twice: {twice[0]}"
        for at in range(TOKENS):
            alone = router(x[at : at + 1], ids[at : at + 1])
            assert torch.equal(alone[0][0], chosen[at]), f"token {at} chooses other experts alone than among others"

    @staticmethod
    def check_weights(component: Any) -> None:
        """Checks that weights are finite, at least fp32, and sum to `total` if declared, and that probabilities sum to 1."""
        router, x, ids = _built_router(component)
        _, weights, probabilities, _ = router(x, ids)
        assert bool(weights.isfinite().all()), "weights are not finite"
        low = router.float()(x.bfloat16(), ids)[1]
        assert low.dtype in (torch.float32, torch.float64), f"weights of bfloat16 tokens are {low.dtype}, not fp32"
        total = getattr(component, "total", None)
        if total is not None:
            error = float((weights.sum(-1) - total).detach().abs().max())
            assert error <= 1e-9, f"weights of a token are off `total` = {total} by {error:.1e}"
        if probabilities is not None:
            assert tuple(probabilities.shape) == (TOKENS, CONTEXT.experts), f"probabilities: {tuple(probabilities.shape)}"
            error = float((probabilities.sum(-1) - 1).detach().abs().max())
            assert error <= 1e-9, f"probabilities of a token are off 1 by {error:.1e}"

    @staticmethod
    def check_learned(component: Any) -> None:
        """Checks that every parameter has a gradient through the weights, or that none exists if `learned` is False."""
        router, x, ids = _built_router(component)
        if getattr(component, "learned", True):
            assert router(x, ids)[2] is not None, "is learned, but gives no probabilities for losses to balance"
            modules.learns(router, lambda: router(x, ids)[1])
        else:
            assert not list(router.parameters()), "has parameters, but `learned` is False"

    @staticmethod
    def check_balance(component: Any) -> None:
        """Checks that `balance`, if defined, changes nothing if `skip` is 1, and otherwise lowers the maximum load."""
        router, x, ids = _built_router(component)
        if not hasattr(router, "balance"):
            return
        before = {name: buffer.clone() for name, buffer in router.named_buffers()}

        def load() -> Any:
            return torch.bincount(router(x, ids)[0].flatten(), minlength=CONTEXT.experts).double()

        first = load()
        router.balance(first, torch.ones(()))
        moved = [name for name, buffer in router.named_buffers() if not torch.equal(buffer, before[name])]
        assert not moved, f"balance with skip = 1 changes {', '.join(moved)}"
        if not getattr(component, "bias_rate", 1):
            return
        fullest = int(first.argmax())
        for _ in range(UPDATES):
            router.balance(load(), torch.zeros(()))
        assert load()[fullest] < first[fullest], f"{UPDATES} times balance leaves expert {fullest} as full as it was"


def _built_router(component: Any) -> Any:
    getattr(component, "check", lambda *_: None)(CONTEXT.experts, CONTEXT.top_k)
    router: Any = modules.part(lambda: component.build(CONTEXT))
    return router, modules.drawn(TOKENS, CONTEXT.dim), torch.arange(TOKENS) * 7
