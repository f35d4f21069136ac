"""Checks of routers: different experts per token, independent tokens, weights with the declared sum."""

from typing import Any

from forge_models.shape import RouterContext

CONTEXT = RouterContext(dim=16, experts=8, top_k=3, layer=1, init_std=0.02)
TOKENS = 24
UPDATES = 200


def check_specs(component: Any) -> None:
    """Checks that `tensor_specs()` describes every parameter and buffer of the module, built on the meta device."""
    from forge_models.conformance import trial

    module = trial.on_meta(lambda: component.build(CONTEXT))
    trial.agree(module, trial.specs_of(module))


def check_choice(component: Any) -> None:
    """Checks `experts` (N, top_k) int64: in range, all different for a token, and independent of other tokens."""
    import torch

    router, x, ids = _built(component)
    chosen, weights = router(x, ids)[:2]
    shape = (TOKENS, CONTEXT.top_k)
    assert tuple(chosen.shape) == shape, f"experts have shape {tuple(chosen.shape)}, not (N, top_k) = {shape}"
    assert tuple(weights.shape) == shape, f"weights have shape {tuple(weights.shape)}, not (N, top_k) = {shape}"
    assert chosen.dtype == torch.int64, f"experts are {chosen.dtype}, not int64"
    assert int(chosen.min()) >= 0 and int(chosen.max()) < CONTEXT.experts, f"experts are not all in 0 to {CONTEXT.experts - 1}"
    twice = [row for row in chosen.tolist() if len(set(row)) < len(row)]
    assert not twice, f"a token chooses an expert twice: {twice[0]}"
    for at in range(TOKENS):
        alone = router(x[at : at + 1], ids[at : at + 1])
        assert torch.equal(alone[0][0], chosen[at]), f"token {at} chooses other experts alone than among others"


def check_weights(component: Any) -> None:
    """Checks that weights are finite, at least fp32, and sum to `total` if declared, and that probabilities sum to 1."""
    import torch

    router, x, ids = _built(component)
    _, weights, probabilities, _ = router(x, ids)
    assert bool(weights.isfinite().all()), "weights are not finite"
    low = router.float()(x.bfloat16(), ids)[1]
    assert low.dtype in (torch.float32, torch.float64), f"weights of bfloat16 tokens are {low.dtype}, not fp32"
    total = getattr(component, "total", None)
    if total is not None:
        error = float((weights.sum(-1) - total).detach().abs().max())
        assert error <= 1e-9, f"weights of a token are off `total` = {total} by {error:.1e}"
    if probabilities is not None:
        assert tuple(probabilities.shape) == (TOKENS, CONTEXT.experts), f"probabilities have shape {tuple(probabilities.shape)}"
        error = float((probabilities.sum(-1) - 1).detach().abs().max())
        assert error <= 1e-9, f"probabilities of a token are off 1 by {error:.1e}"


def check_learned(component: Any) -> None:
    """Checks that every parameter has a gradient through the weights, or that there are no parameters if `learned` is False."""
    from forge_models.conformance import trial

    router, x, ids = _built(component)
    if getattr(component, "learned", True):
        assert router(x, ids)[2] is not None, "is learned, but gives no probabilities for losses to balance"
        trial.learns(router, lambda: router(x, ids)[1])
    else:
        assert not list(router.parameters()), "has parameters, but `learned` is False"


def check_balance(component: Any) -> None:
    """Checks that `balance`, if defined, changes nothing if `skip` is 1, and otherwise reduces the load of the fullest expert."""
    import torch

    router, x, ids = _built(component)
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


def _built(component: Any) -> Any:
    import torch

    from forge_models.conformance import trial

    getattr(component, "check", lambda *_: None)(CONTEXT.experts, CONTEXT.top_k)
    router: Any = trial.part(lambda: component.build(CONTEXT))
    return router, trial.drawn(TOKENS, CONTEXT.dim), torch.arange(TOKENS) * 7
