"""`parallelize`: one call that parallelizes a foreign module, for code bases with their own training loop.

    model = parallelize(lambda: MyModel(config), "dp2tp2", [Recompute(policy="full")], tp_plan={"blocks.*.up": "colwise", ...})
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs in loader:                        # different data on each of `model.data_ranks` ranks
        loss_of(model(**inputs)).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step(); optimizer.zero_grad()

Transforms are applied by their `order`, whatever the order of the list.
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
    """Collective: parallelizes a module over the ranks of the running process group; layout "1" needs no group.

    The result is called and trained like the module. Gradients are averaged over data ranks, so each rank computes the mean loss
    of its own rows:

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
        source: a module with the same weights on all ranks, which is consumed; or a function that builds one. The operators of
            the builder's constructors are recorded and replayed per parameter, so only one full parameter exists at a time.
        layout: such as "dp2tp2" or "hsdp2x4"; see `forge_core.layout.Layout.parse`.
        transforms: components or transforms besides those that the layout implies, such as `Recompute()` and `Compile()`.
        tp_plan: pattern of module paths -> style; transformers models have their own plan.
        blocks: paths of the repeated blocks in forward order; they are sharded, recomputed and compiled one by one and assigned
            to pipeline stages. Default: modules of the classes in `_no_split_modules`, otherwise those of the longest list of
            modules of one class and of all other lists of that class, if they are called and share no parameters.
        pipeline: schedule and split for layouts with pp; default 1f1b, balanced by parameters. Train such a model with `.step`.
        device: device of this rank; default the current CUDA device, otherwise the CPU.
        compute: dtype of forward and backward: `bf16`, `fp32` or `fp64`. With `bf16` on one data rank, run forward and backward
            inside `with model.computing():`.
        state: dtype of parameters, gradients and optimizer state: `fp32`, `fp64` or `bf16`.
        seed: seed of the random numbers of a builder.
        example: a few rows of input: a tensor (rows, ...) or keyword arguments. Forwards on the meta device use it to find blocks
            and to detect modules that cannot be parallelized. With pp the input is (rows, length) and the example has all
            arguments of `.step`, for example labels if the module computes the loss. Default: token ids (2, 8) for the first
            embedding, or features (2, 8, in_features) for the first linear layer.
        verify: whether to run `forge_parallel.verify_layout` first, which compares a step with one process. Do so once per
            module.

    Raises:
        PlanError: the module or layout is not supported; for example cp, ep and etp, tp without a plan, weights that differ
            between ranks, inputs that are modified in place, a module that cannot be split into pipeline stages.
        LayoutError: the layout's number of ranks differs from the world size.
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
