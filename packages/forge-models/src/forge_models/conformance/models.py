"""Checks of models: complete specs, causal, separate documents, all state in named tensors."""

from typing import Any


def check_specs(component: Any) -> None:
    """Checks that `specs()` describes every tensor, tie and block of the model, built on the meta device."""
    from forge_models.conformance import trial

    module, specs = _described(component)
    trial.agree(module, specs.tensors)
    first: dict[int, str] = {}
    every = module.named_parameters(remove_duplicate=False)
    ties = {name: first[id(tensor)] for name, tensor in every if first.setdefault(id(tensor), name) != name}
    assert ties == dict(specs.ties), f"shares tensors {ties}, but specs say {dict(specs.ties)}"
    paths = dict(module.named_modules())
    lost = sorted(path for path in (*specs.blocks, *specs.entry, *specs.exit, *specs.modules) if path not in paths)
    assert not lost, f"specs name modules that are not there: {', '.join(lost)}"


def check_causality(component: Any) -> None:
    """Checks that the logits of each token depend on the previous token but on no later one."""
    from forge_models.conformance import trial

    model, specs = _built(component)
    x, other = _tokens(specs, model, 1), _tokens(specs, model, 2)
    trial.causal(model, x, other.where(other != x, (x + 1) % _vocab(specs, model)))


def check_documents(component: Any) -> None:
    """Checks that a document in a packed row has the same logits as alone."""
    import torch

    from forge_models.conformance import trial

    model, specs = _built(component)
    x, cut = _tokens(specs, model, 1), 5
    documents = (torch.arange(x.shape[1]) >= cut).int().expand(x.shape).contiguous()
    positions = torch.arange(x.shape[1]) - cut * documents
    with torch.no_grad():
        packed = model(x, positions=positions.int(), documents=documents)
        trial.same(packed[:, :cut], model(x[:, :cut]), "the first document of a row sees another")
        trial.same(packed[:, cut:], model(x[:, cut:]), "the second document of a row sees another")


def check_deterministic(component: Any) -> None:
    """Checks that the same tokens give bitwise equal logits in evaluation."""
    from forge_models.conformance import trial

    model, specs = _built(component)
    x = _tokens(specs, model, 1)
    trial.repeats(lambda: model(x))


def check_gradients(component: Any) -> None:
    """Checks that the model returns the terms of an objective, and that every parameter has a finite, nonzero gradient."""
    import torch

    from forge_core.batch import Batch
    from forge_models.objectives import CrossEntropy

    model, specs = _built(component)
    x = _tokens(specs, model, 1)
    batch = Batch(x, _tokens(specs, model, 2)).with_mtp_targets(specs.mtp_depth)
    batch = getattr(model, "with_extras", lambda batch: batch)(batch)
    extra = {"mtp_targets": batch.mtp_targets} if specs.mtp_depth else {}
    for module in model.train().modules():
        if hasattr(module, "before_step"):
            module.before_step(torch.tensor(1 / x.numel(), dtype=torch.float64))
    given = {**extra, **batch.extras}
    model(batch.tokens, labels=batch.labels, objective=CrossEntropy(), **given).sum.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} gets no gradient"
        assert bool(parameter.grad.isfinite().all()), f"the gradient of {name} is not finite"
        idle = name in getattr(model, "without_loss", ())
        assert idle or bool(parameter.grad.any()), f"the gradient of {name} is 0 everywhere"


def check_names(component: Any) -> None:
    """Checks that named tensors are the whole state: another model with the same tensors has the same logits."""
    import torch

    from forge_models.conformance import trial

    (one, specs), (other, _) = _built(component, 0), _built(component, 1)
    x = _tokens(specs, one, 1)
    given = dict(one.named_parameters()) | dict(one.named_buffers())
    with torch.no_grad():
        wanted, before = one(x), other(x)
        assert not torch.equal(wanted, before), "logits do not depend on the parameters"
        for name, tensor in (*other.named_parameters(), *other.named_buffers()):
            tensor.copy_(given[name])
        trial.same(other(x), wanted, "a model that is given all tensors by name, and the one that gave them")


def _described(component: Any) -> Any:
    from forge_models.conformance import trial

    module: Any = trial.on_meta(component.build)
    assert callable(getattr(module, "specs", None)), "does not describe itself: give it specs() -> forge_core.specs.Specs"
    return module, module.specs()


def _built(component: Any, seed: int = 0) -> Any:
    from forge_models.conformance import trial

    module, specs = _described(component)
    trial.agree(module, specs.tensors)
    return trial.filled(module, specs.tensors, specs.ties, seed), specs


def _vocab(specs: Any, model: Any) -> int:
    sizes = [
        model.get_parameter(name).shape[spec.dims.index("vocab")] for name, spec in specs.tensors.items() if "vocab" in spec.dims
    ]
    assert sizes, "no spec names the dimension 'vocab'"
    return min(*sizes, getattr(model, "plain_ids", sizes[0]))


def _tokens(specs: Any, model: Any, seed: int) -> Any:
    import torch

    from forge_models.conformance import trial

    draw = torch.Generator().manual_seed(seed)
    return torch.randint(_vocab(specs, model), (trial.ROWS, trial.LENGTH), generator=draw)
