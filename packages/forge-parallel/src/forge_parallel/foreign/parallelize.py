"""One call that lays out a foreign module: the short road for code bases with their training loop.

    model = parallelize(lambda: MyModel(config), "dp2tp2", [Recompute(policy="full")], tp_plan={"blocks.*.up": "colwise", ...})
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs in loader:                        # other data on each of `model.data_ranks` ranks
        loss_of(model(**inputs)).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step(); optimizer.zero_grad()

Strategies are applied in the order of their phases, not in the order given, as everywhere in Forge.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from forge_core.layout import Layout
from forge_parallel.foreign.description import Example
from forge_parallel.foreign.module import ParallelizedModule, lay_out, refuse_axes
from forge_parallel.foreign.verification import verify_layout
from forge_parallel.pipeline.definition import Pipeline


def parallelize(
    source: nn.Module | Callable[[], nn.Module],
    layout: str | Layout,
    transforms: Iterable[Any] = (),
    *,
    tp_plan: Mapping[str, str] | None = None,
    blocks: Sequence[str] | None = None,
    pipeline: Pipeline | None = None,
    device: torch.device | str | None = None,
    compute: str = "fp32",
    state: str = "fp32",
    seed: int = 0,
    example: Example | None = None,
    verify: bool = False,
) -> ParallelizedModule:
    """Collective: lays out a module over the ranks of the running process group; "1" needs no group.

    The result is called and trained as the module. Gradients are averaged over data ranks, so each takes the mean loss of its
    own rows:

        from torch import nn

        build = lambda: nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 16), nn.Linear(16, 100))
        model = parallelize(build, "1", seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        tokens = torch.arange(64).view(8, 8)  # (rows, length)
        logits = model(tokens)  # (rows, length, 100)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        norm = model.clip_grad_norm_(1.0)  # over all ranks
        optimizer.step()

    Args:
        source: a module, whose weights all ranks hold alike and which is consumed; or a function that builds one, whose
            parameters then exist whole one at a time: what its constructors do to them is recorded and replayed.
        layout: such as "dp2tp2" or "hsdp2x4"; see `forge_core.layout.Layout.parse`.
        transforms: components or transforms beyond those that the axes ask for, such as `Recompute()` and `Compile()`.
        tp_plan: patterns of module paths -> styles; a transformers model brings its own.
        blocks: paths of the repeated blocks in forward order, which are sharded, recomputed and compiled one by one, and handed
            to stages. By default modules of the classes in `_no_split_modules`, else of the longest list of modules of one
            class and of all other lists of that class; only modules that are called and share no parameters with others.
        pipeline: schedule and split where the layout has pp; by default 1f1b, balanced by parameters. Train with `.step` then.
        device: of this rank; by default the current CUDA device, or the CPU.
        compute: `bf16`, `fp32` or `fp64`, of forward and backward. With `bf16` on one data rank, span forward and backward
            by `with model.computing():`.
        state: `fp32`, `fp64` or `bf16`, of parameters, gradients and optimizer state.
        seed: of a builder's random numbers.
        example: what the module is called with, a tensor (rows, ...) or its keyword arguments, a few rows. Forwards without
            memory are watched with it, to find blocks and what cannot be laid out; under pp the input is (rows, length). By
            default token ids (2, 8) of the first embedding, or features (2, 8, in_features) of the first linear layer. With pp
            it has all arguments that steps give, labels for a loss in the module among them.
        verify: first compare a probe step with one process, as `forge_parallel.verify_layout` does. Do so once for every module.

    Raises:
        PlanError: what cannot be laid out, by name: cp, ep and etp, tp without a plan, weights that differ between ranks, an
            input that is changed in place, a module that stages cannot share.
        LayoutError: the layout has another number of ranks than are running.
    """
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    refuse_axes(layout)
    transforms = list(transforms)
    if verify:
        options = {"tp_plan": tp_plan, "blocks": blocks, "pipeline": pipeline, "device": device}
        verify_layout(source, layout, transforms, **options, seed=seed, example=example)
    return lay_out(
        source,
        layout,
        transforms,
        tp_plan=tp_plan,
        blocks=blocks,
        pipeline=pipeline,
        device=device,
        compute=compute,
        state=state,
        seed=seed,
        example=example,
    )
