"""Checks of models and objectives."""

from typing import Any

import torch

from forge_testing import modules


class ModelChecks:
    """Checks of models: complete specs, causal, separate documents, all state in named tensors."""

    @staticmethod
    def check_specs(component: Any) -> None:
        """Checks that `specs()` describes every tensor, tie and block of the model, built on the meta device."""
        module, specs = _described(component)
        modules.agree(module, specs.tensors)
        first: dict[int, str] = {}
        every = module.named_parameters(remove_duplicate=False)
        ties = {name: first[id(tensor)] for name, tensor in every if first.setdefault(id(tensor), name) != name}
        assert ties == dict(specs.ties), f"shares tensors {ties}, but specs say {dict(specs.ties)}"
        paths = dict(module.named_modules())
        lost = sorted(path for path in (*specs.blocks, *specs.entry, *specs.exit, *specs.modules) if path not in paths)
        assert not lost, f"specs name modules that are not there: {', '.join(lost)}"

    @staticmethod
    def check_shape(component: Any) -> None:
        """Checks that `shape`, if strategies can read it before the model is built, agrees with `specs()`."""
        shape: Any = getattr(component, "shape", None)
        if not hasattr(shape, "units"):
            return
        module, specs = _described(component)
        for name in ("units", "whole_rows", "whole_stream"):
            said, built = getattr(shape, name), getattr(specs, name)
            assert said == built, f"shape says {name} {said}, specs {built}"
        if shape.declares_matrices:
            said = {name: matrix.shape for name, matrix in shape.matrices()[0].items()}
            linear = {name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
            groups = {name: specs.tensors[f"{name}.weight"].group for name in linear if f"{name}.weight" in specs.tensors}
            built = {name: tuple(linear[name].weight.shape) for name, group in groups.items() if group == "matrix"}
            assert said == built, f"shape says that the matrices are {said}, but they are {built}"

    @staticmethod
    def check_causality(component: Any) -> None:
        """Checks that the logits of each token depend on the previous token but on no later one."""
        model, specs = _built(component)
        x, other = _tokens(specs, model, 1), _tokens(specs, model, 2)
        modules.causal(model, x, other.where(other != x, (x + 1) % _vocab(specs, model)))

    @staticmethod
    def check_documents(component: Any) -> None:
        """Checks that a document in a packed row has the same logits as alone, or that the row is refused if `packs` is False."""
        model, specs = _built(component)
        x, cut = _tokens(specs, model, 1), 5
        documents = (torch.arange(x.shape[1]) >= cut).int().expand(x.shape).contiguous()
        positions = torch.arange(x.shape[1]) - cut * documents
        if not getattr(model, "packs", True):
            try:
                model(x, positions=positions.int(), documents=documents)
            except ValueError:
                return
            raise AssertionError("says that it keeps no documents apart, but takes a row with two")
        with torch.no_grad():
            packed = model(x, positions=positions.int(), documents=documents)
            modules.same(packed[:, :cut], model(x[:, :cut]), "the first document of a row sees another")
            modules.same(packed[:, cut:], model(x[:, cut:]), "the second document of a row sees another")

    @staticmethod
    def check_deterministic(component: Any) -> None:
        """Checks that the same tokens give bitwise equal logits in evaluation."""
        model, specs = _built(component)
        x = _tokens(specs, model, 1)
        modules.repeats(lambda: model(x))

    @staticmethod
    def check_gradients(component: Any) -> None:
        """Checks that the model returns the terms of an objective, and that every parameter has a finite, nonzero gradient, but
        none of a frozen base."""
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
        idle = getattr(model, "without_loss", ())
        for name, parameter in model.named_parameters():
            if name in specs.base:
                assert parameter.grad is None, f"{name} belongs to the frozen base, but gets a gradient"
                continue
            if parameter.grad is None and name in idle:
                continue
            assert parameter.grad is not None, f"{name} gets no gradient"
            assert bool(parameter.grad.isfinite().all()), f"the gradient of {name} is not finite"
            assert name in idle or bool(parameter.grad.any()), f"the gradient of {name} is 0 everywhere"

    @staticmethod
    def check_names(component: Any) -> None:
        """Checks that named tensors are the whole state: another model with the same tensors has the same logits."""
        (one, specs), (other, _) = _built(component, 0), _built(component, 1)
        x = _tokens(specs, one, 1)
        given = dict(one.named_parameters()) | dict(one.named_buffers())
        with torch.no_grad():
            wanted, before = one(x), other(x)
            assert not torch.equal(wanted, before), "logits do not depend on the parameters"
            for name, tensor in (*other.named_parameters(), *other.named_buffers()):
                tensor.copy_(given[name])
            modules.same(other(x), wanted, "a model that is given all tensors by name, and the one that gave them")


def _described(component: Any) -> Any:
    module: Any = modules.on_meta(component.build)
    assert callable(getattr(module, "specs", None)), "does not describe itself: give it specs() -> forge_core.specs.Specs"
    return module, module.specs()


def _built(component: Any, seed: int = 0) -> Any:
    module, specs = _described(component)
    modules.agree(module, specs.tensors)
    return modules.filled(module, specs.tensors, specs.ties, seed), specs


def _vocab(specs: Any, model: Any) -> int:
    sizes = [
        model.get_parameter(name).shape[spec.dims.index("vocab")] for name, spec in specs.tensors.items() if "vocab" in spec.dims
    ]
    assert sizes, "no spec names the dimension 'vocab'"
    return min(*sizes, getattr(model, "plain_ids", sizes[0]))


def _tokens(specs: Any, model: Any, seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(_vocab(specs, model), (modules.ROWS, modules.LENGTH), generator=draw)


SIZES = (4, 6, 8, 10)
"""Number of rows, tokens per row, width, vocabulary size."""


class ObjectiveChecks:
    """Checks of objectives: they sum over valid tokens, so that micro-batches and ranks add up to the whole batch."""

    @staticmethod
    def check_sums(component: Any) -> None:
        """Checks that `sum`, `tokens`, metrics and gradients of micro-batches add up to those of the whole batch."""
        head, hidden, labels = _given(component)
        whole, gradients = _terms(component, head, hidden, labels)
        for cut in (1, 2):
            one, grad_one = _terms(component, head, hidden[:cut], labels[:cut])
            two, grad_two = _terms(component, head, hidden[cut:], labels[cut:])
            modules.same(one.sum + two.sum, whole.sum, "`sum` of two micro-batches and of their batch")
            for name, value in whole.metrics.items():
                modules.same(one.metrics[name] + two.metrics[name], value, f"metric {name!r} of micro-batches and batch")
            modules.same(grad_one + grad_two, gradients, "gradients of two micro-batches and of their batch")
            count = int(one.tokens) + int(two.tokens)
            assert count == int(whole.tokens), f"micro-batches have {count} tokens, their batch {int(whole.tokens)}"

    @staticmethod
    def check_tokens(component: Any) -> None:
        """Checks that `tokens` counts the labels that are not IGNORE, or what the objective's `counts` counts, and that tokens
        without a label add nothing to `sum`."""
        from forge_core.batch import IGNORE

        head, hidden, labels = _given(component)
        terms, _ = _terms(component, head, hidden, labels)
        counts = getattr(component.build(), "counts", None)
        valid = int((labels != IGNORE).sum() if counts is None else counts(_batch(component, labels)).sum())
        assert int(terms.tokens) == valid, f"tokens is {int(terms.tokens)}, but {valid} labels are not IGNORE"
        other = torch.where((labels == IGNORE).unsqueeze(-1), modules.drawn(*hidden.shape, seed=9), hidden)
        modules.same(_terms(component, head, other, labels)[0].sum, terms.sum, "`sum` depends on tokens without a label")

    @staticmethod
    def check_rows(component: Any) -> None:
        """Checks that `rows`, if returned, are the contributions of each row to `sum`."""
        head, hidden, labels = _given(component)
        terms, _ = _terms(component, head, hidden, labels)
        if terms.rows is None:
            return
        assert not terms.rows.requires_grad, "rows have a graph; detach them"
        for row in range(len(labels)):
            alone, _ = _terms(component, head, hidden[row : row + 1], labels[row : row + 1])
            modules.same(terms.rows[row].double(), alone.sum.double(), f"rows[{row}] and `sum` of that row alone")

    @staticmethod
    def check_nothing(component: Any) -> None:
        """Checks that a batch without labels gives 0 with a graph and gradients of 0: such ranks join the step."""
        from forge_core.batch import IGNORE

        head, hidden, labels = _given(component)
        terms, gradients = _terms(component, head, hidden, torch.full_like(labels, IGNORE))
        assert int(terms.tokens) == 0, f"tokens is {int(terms.tokens)} without labels"
        assert float(terms.sum) == 0, f"`sum` is {float(terms.sum)} without labels, not 0"
        assert not bool(gradients.any()), "gradients are not 0 without labels"


def _given(component: Any) -> Any:
    from forge_core.batch import IGNORE
    from forge_models.blocks.head import Head

    rows, length, width, vocab = SIZES
    head = modules.part(lambda: Head(width, vocab, 0.02))
    labels = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(3))
    labels[0, 2:] = IGNORE  # rows with different numbers of labels, to detect a mean over rows
    labels[2, 0] = IGNORE
    if getattr(component, "classifies", False):  # labels of whole texts
        labels = _batch(component, labels).labels
    return head, modules.drawn(rows, length, width), labels


def _batch(component: Any, labels: Any) -> Any:
    """Returns a batch with these labels and two documents in each row, with the targets of the objective."""
    from forge_core.batch import Batch

    index = torch.arange(labels.shape[1], dtype=torch.int32).expand(labels.shape)
    documents = (index >= 2).int()
    batch = Batch(labels.clamp(min=0), labels, index - 2 * documents, documents)
    return getattr(component.build(), "with_targets", lambda batch: batch)(batch)


def _terms(component: Any, head: Any, hidden: Any, labels: Any) -> Any:
    """Returns the terms, and the gradients of the head's weight and of a constant added to all hidden states."""
    head.zero_grad(set_to_none=True)
    shift = torch.zeros(hidden.shape[-1], dtype=hidden.dtype, requires_grad=True)
    objective = component.build()
    if hasattr(objective, "bound"):
        objective = objective.bound(_batch(component, labels))
    terms = objective(head, hidden + shift, labels)
    assert terms.sum.requires_grad, "`sum` has no graph"
    terms.sum.backward()
    missing = torch.zeros_like(head.weight)
    assert shift.grad is not None, "`sum` does not depend on the hidden states"
    gradients = torch.cat((missing if head.weight.grad is None else head.weight.grad, shift.grad.unsqueeze(0)))
    return terms._replace(sum=terms.sum.detach()), gradients
