"""Checks across sections that concern layouts: functions of (job, layout) that run before torch is imported.

A job is any object with the sections of a recipe as attributes. Rules about a model and a layout are checked on the model's shape
before it is built, if the component's `shape` has the attributes of `forge_models.shape.DecoderShape`. Other models are checked
when they are built on the meta device, at the start of a run and by `plan`, before anything is written. The arithmetic is in
`forge_parallel.placement.shares`, which the strategies use too.
"""

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from forge_core.component import class_name, fields_of
from forge_core.errors import Fault, PlanError, did_you_mean
from forge_core.features import Use, undeclared
from forge_core.layout import Layout, divisors
from forge_core.registry import Registry
from forge_parallel.placement import shares
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.float8.transform import Float8
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.proofs import ParallelJob, batches_of, features, is_ours, lengths_of, strategies, unproven

UNPROVEN = "no test proves that it equals one process"


def batch_fits(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Checks that the global batch can be split into whole micro-batches on every data rank."""
    train = job.train
    rows, left = divmod(train.global_batch, layout.data)
    if left:
        legal = ", ".join(str(n) for n in divisors(train.global_batch))
        yield Fault(
            "train.global_batch",
            f"{train.global_batch} sequences cannot be divided among {layout.data} data ranks",
            hint=f"dp_replicate * dp_shard may be {legal}",
        )
    elif rows % train.micro_batch:
        legal = ", ".join(str(n) for n in divisors(rows))
        yield Fault(
            "train.micro_batch",
            f"a rank has {rows} sequences per step, which micro-batches of {train.micro_batch} do not divide",
            hint=f"with global_batch = {train.global_batch} on {layout.data} data ranks it may be {legal}",
        )


def rows_can_be_cut(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Checks that context-parallel ranks can split rows into equal pieces: two per rank, or one for `ulysses`."""
    if layout.cp == 1:
        return
    pieces = layout.cp if _context_kind(job) == "ulysses" else 2 * layout.cp
    for key, length in lengths_of(job).items():
        below = length - length % pieces
        if below != length:
            yield Fault(
                key,
                f"{length} tokens cannot be split into {pieces} equal pieces for parallel.cp = {layout.cp}",
                hint=" or ".join(str(legal) for legal in (below, below + pieces) if legal) + " can",
            )


def float8_fits(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Checks that micro-batches have a multiple of 16 tokens, as float8 kernels need; emulated ones accept any number."""
    float8 = job.transforms.get("float8")
    if float8 is None:
        return
    if job.precision.compute == "fp64":
        yield Fault("precision.compute", "'fp64' is not supported with transforms.float8", hint="use 'bf16', or 'fp32' for tests")
    if getattr(float8, "emulate", "auto") is True:
        return
    for key, length in lengths_of(job).items():
        tokens = job.train.micro_batch * length // layout.cp
        if tokens % 16:
            yield Fault(
                "train.micro_batch" if key == "data.sequence_length" else key,
                f"a micro-batch has {tokens} tokens on a rank, but transforms.float8 needs a multiple of 16",
                hint=f"choose another micro_batch or {key}, or transforms.float8.emulate = true",
            )


def sequence_can_be_cut(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Checks that with sequence parallelism tp ranks can split a cp rank's part of a row into equal parts."""
    tensor = job.transforms.get("tensor")
    if layout.tp == 1 or (tensor is not None and not tensor.sequence_parallel):
        return
    for key, length in lengths_of(job).items():
        if length % layout.cp == 0 and length // layout.cp % layout.tp:
            pieces = layout.cp * layout.tp
            yield Fault(
                key,
                f"{length // layout.cp} tokens of a row cannot be split into {layout.tp} equal parts for parallel.tp",
                hint=f"a multiple of {pieces} can; or set transforms.tensor.sequence_parallel = false",
            )


def nodes_fit(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Checks that the nodes of a hierarchical dispatcher split the ranks of ep evenly, and that there are several."""
    expert = job.transforms.get("expert")
    node = getattr(expert, "ranks_per_node", None)
    if layout.ep == 1 or node is None or (node < layout.ep and layout.ep % node == 0):
        return
    legal = ", ".join(str(n) for n in divisors(layout.ep)[1:-1])
    yield Fault(
        "transforms.expert.ranks_per_node",
        f"{node} ranks do not divide parallel.ep = {layout.ep} into several nodes",
        hint=f"it may be {legal}" if legal else "use dispatcher = 'all_to_all'",
    )


def compiled_recompute_fits(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Checks that recomputation supports compiled blocks: only `full` if compiled in pieces, only `selective` with tp."""
    policy = getattr(job.transforms.get("recompute"), "policy", None)
    if "compile" not in job.transforms:
        return
    apart = getattr(job.model, "moe", None) is not None and layout.tp * layout.ep * layout.etp > 1
    if apart and policy == "selective":
        yield Fault(
            "transforms.recompute.policy",
            "'selective' is not supported for blocks that transforms.compile compiles in pieces: those whose experts are sharded "
            "separately (parallel.ep or parallel.tp > 1)",
            hint="set it to 'full', or remove transforms.compile" if layout.tp == 1 else "remove transforms.compile",
        )
    if layout.tp > 1 and policy == "full":
        yield Fault(
            "transforms.recompute.policy",
            "'full' with transforms.compile is not supported if parallel.tp > 1: torch fails in the first forward, because it "
            "would save a device mesh among the inputs of the recomputed block",
            hint="remove transforms.compile" if apart else "set it to 'selective', or remove transforms.compile",
        )


def pipeline_fits(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Checks that blocks can be split over the stages, and that the schedule supports the number of micro-batches."""
    if layout.pp == 1:
        return
    pipeline = job.parallel.pipeline.build()
    # The number of blocks is known here only if the model has `layers`; otherwise the split is checked before allocation.
    blocks = getattr(job.model, "layers", None)
    for why in pipeline.refusals(layout.pp, blocks=blocks if isinstance(blocks, int) else None):
        yield Fault("parallel.pipeline.split", why, hint="change parallel.pp, the split, or the schedule's stages per rank")
    for name, transform in job.transforms.items() if pipeline.schedule.splits_backward else ():
        if getattr(transform, "whole_backward", False):
            yield Fault(
                f"transforms.{name}",
                f"is not supported with pipeline schedule {pipeline.schedule.name!r}, which splits the backward pass",
                hint="remove it, or use the schedule 1f1b or interleaved",
            )
    if pipeline.schedule.splits_backward and getattr(getattr(job.model, "mtp", None), "depth", 0) > 1:
        yield Fault(
            "model.mtp.depth",
            f"= {job.model.mtp.depth} is not supported with pipeline schedule "
            f"{pipeline.schedule.name!r}, which splits the backward pass",
            hint="set it to 1, or use the schedule 1f1b or interleaved",
        )
    for key, batch in batches_of(job).items():
        micro_batches, left = divmod(batch, layout.data * job.train.micro_batch)
        for why in pipeline.refusals(layout.pp, micro_batches=None if left else micro_batches):
            yield Fault("parallel.pipeline.schedule", why, hint=f"change {key} or train.micro_batch")


def _context_kind(job: ParallelJob) -> str:
    return str(getattr(job.transforms.get("context"), "kind", ContextParallel().kind))


def options_are_declared(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Checks that on several ranks every option declares whether it reaches a collective; options of plugins may not."""
    for key, component in strategies(job, layout).items() if layout.world > 1 else ():
        for name, values in undeclared(type(component)) if is_dataclass(component) else ():
            which = f" for {' and '.join(map(repr, values))}" if values else ""
            yield Fault(
                f"{key}.{name}",
                f"does not say whether it reaches a collective{which}",
                hint=f"annotate it in {type(component).__qualname__} with forge_core.features.Feature or Neutral",
            )


def optimizer_takes_parts(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Checks that the optimizer supports sharded tensors; one without `shards` is for one process, or replicas of it."""
    from forge_parallel.optim import optimizers

    if why := optimizers.sharding_fault(job.optimizer, layout):
        yield Fault("optimizer.name", why, hint=optimizers.HINT)


def optimizer_keeps_the_state(job: ParallelJob, layout: Layout) -> Iterator[Fault]:  # noqa: ARG001 (signature of a check)
    """Checks that the optimizer supports the state's format (`states`); one without `states` supports any."""
    states, state = getattr(job.optimizer, "states", None), job.precision.state
    if states is not None and state not in states:
        said = f"{class_name(job.optimizer)} updates parameters of {' and '.join(sorted(states))}"
        yield Fault("precision.state", f"is {state!r}, but {said}", hint="set precision.state = 'fp32', or use adamw")


def compositions_are_proven(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Refuses features, and pairs of features, that no parity test covers."""
    used = features(job, layout)
    missing, stale = unproven(used), ""
    if any(not is_ours(use.name) for uses in missing for use in uses):
        missing, stale = _without_receipts(job, used)
    for uses in missing:
        keys, hint = " with ".join(use.key for use in uses), "leave one of them out"
        if any(not is_ours(use.name) for use in uses):
            record = f"`forge-train parity RECIPE --layouts {layout} --record DIR`"
            hint = f"measure it with {record} and set parallel.proofs = ['DIR'], or {hint}{stale}"
        yield Fault("parallel", f"{keys}: {UNPROVEN}", hint=hint)


def _without_receipts(job: ParallelJob, used: list[Use]) -> tuple[list[tuple[Use, ...]], str]:
    """Returns what receipts do not prove either, and which receipts do not count because code has changed."""
    from forge_parallel.verify import proofs

    receipts, now = proofs.offered(job.parallel.proofs, Registry()), proofs.digests(used)
    counted = [frozenset(receipt.features) for receipt in receipts if receipt.holds(now)]
    changed = sorted({name for receipt in receipts for name in receipt.changed(now)} & now.keys())
    return unproven(used, counted), f" (receipts of other code of {', '.join(changed)} do not count)" if changed else ""


def widths_can_be_scaled(job: ParallelJob, layout: Layout | None) -> Iterator[Fault]:  # noqa: ARG001 (signature of a check)
    """Checks that width scaling supports the optimizer, and that its keys are keys of the model."""
    parameters = getattr(job, "parameters", None)
    if parameters is None or not parameters.width_base:
        return
    name = class_name(job.optimizer)
    if getattr(job.optimizer, "width_rule", None) != "adam":
        yield Fault(
            "parameters.width_base",
            f"optimizer {name} has no rule for width scaling, which is known for Adam and sign descent only",
            hint="choose another optimizer; or, if it moves each element by the rate, set `width_rule: ClassVar = 'adam'` in it",
        )
    known = [info.name for info in fields_of(type(job.model))]
    for key in parameters.width_base:
        if key not in known:
            yield Fault(f"parameters.width_base.{key}", "[model] has no such key", hint=did_you_mean(key, known))


def shape_of(job: ParallelJob) -> Any:
    """Returns the shape of the recipe's model; None if it has none that says how the model can be split."""
    shape = getattr(job.model, "shape", None)
    return shape if hasattr(shape, "units") else None


def left_to_the_start(job: ParallelJob, layout: Layout | None) -> tuple[str, ...]:
    """Returns the keys that these rules do not check, because the model's shape does not say enough."""
    shape = shape_of(job)
    left = {
        "parallel.tp": shape is None and layout is not None and layout.tp > 1,
        "parallel.cp": shape is None and layout is not None and layout.cp > 1,
        "transforms.float8": (shape is None or not shape.declares_matrices) and "float8" in job.transforms,
    }
    return tuple(key for key, unchecked in left.items() if unchecked)


def split_widths(model: Any) -> Iterator[tuple[str, int]]:
    """Yields key and rows of each table and width of a model component that tp ranks split without regard to units."""
    shape = model.shape
    yield "model.vocab_size", shape.vocab_size
    if shape.has_dense:
        yield "model.ffn_dim", shape.ffn_dim
    if shape.moe is not None and shape.moe.shared:
        key = "model.ffn_dim" if getattr(getattr(model, "moe", None), "ffn_dim", None) is None else "model.moe.ffn_dim"
        yield key, shape.moe.shared * shape.moe.ffn_dim


def tensors_can_be_cut(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Ranks of tp share heads, widths and vocabulary, and the stream where sequences are cut."""
    if layout.tp == 1 or (shape := shape_of(job)) is None:
        return
    if why := shares.heads_refusal(shape.units, layout.tp):
        states = shape.units.get("state_heads", 0) % layout.tp
        fits = shares.heads_refusal({**shape.units, "state_heads": layout.tp}, layout.tp) is None
        unit = "attention" if states and fits else "heads" if shape.heads % layout.tp else "kv_heads"
        if unit == "kv_heads" and "common_kv_heads" in shape.units:
            unit = "attention.global_kv_heads"
        if shape.heads % layout.tp == 0 and shape.units.get("output_groups", layout.tp) % layout.tp:
            unit = "attention.o_groups"
        yield Fault(f"model.{unit}", why, hint="change it, or change parallel.tp")
    for key, rows in dict.fromkeys(split_widths(job.model)):
        if why := shares.rows_refusal(key, rows, layout.tp):
            yield Fault(key, why, hint=f"raise it, or set parallel.tp to at most {rows}")
    tensor = job.transforms.get("tensor", TensorParallel())
    # Experts have to see different tokens on every rank of tp, so with them sequences are cut.
    dense = getattr(job.model, "moe", None) is None
    hint = "set transforms.tensor.sequence_parallel = false, or parallel.tp = 1" if dense else "remove it, or set parallel.tp = 1"
    for reason in shape.whole_stream if getattr(tensor, "sequence_parallel", True) else ():
        yield Fault(_key(reason), shares.stream_refusal([reason]) or "", hint=hint)


def rows_can_be_shared(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Ranks of cp share rows, in the way that attention is asked to see them."""
    if layout.cp == 1 or (shape := shape_of(job)) is None:
        return
    for reason in shape.whole_rows:
        yield Fault(_key(reason), shares.whole_rows_refusal([reason]) or "", hint="remove it, or set parallel.cp = 1")
    if why := shares.exchange_refusal(shape.units, layout.cp, layout.tp):
        yield Fault("model.attention", why, hint="change key_heads, or change parallel.cp")
    kind = getattr(job.transforms.get("context", ContextParallel()), "kind", None)
    if kind == "ulysses" and (why := shares.ulysses_refusal(shape.heads, layout.cp, layout.tp)):
        yield Fault("transforms.context.kind", why)
    capped = getattr(shape.attention, "soft_cap", None) is not None
    if kind == "ring" and (why := shares.ring_refusal("model.attention", capped, shape.causal)):
        yield Fault("transforms.context.kind", why)


def float8_can_multiply(job: ParallelJob, layout: Layout) -> Iterator[Fault]:
    """Float8 finds layers to convert, of shapes that it takes on every rank."""
    float8 = job.transforms.get("float8")
    if not isinstance(float8, Float8) or (shape := shape_of(job)) is None or not shape.declares_matrices:
        return
    from forge_parallel.transforms.float8 import layers

    hidden, stacked = shape.matrices()
    stacks = tuple(dict.fromkeys(name.rpartition(".")[0] for name in stacked)) if float8.experts else ()
    try:
        chosen = layers.selected([*hidden, *stacks], float8.include, float8.exclude)
    except PlanError as error:
        yield Fault("transforms.float8", str(error))
        return
    linear = {path: matrix for path, matrix in hidden.items() if path in chosen}
    fits = shares.heads_refusal(shape.units, layout.tp) is None  # else it is not known what a rank would hold
    if fits and (why := shares.float8_refusal(linear, shape.units, layout.tp)):
        yield Fault("transforms.float8", why)
    if not float8.experts:
        return
    experts = {name: matrix for name, matrix in stacked.items() if name.rpartition(".")[0] in chosen}
    if not experts:
        there = "include and exclude leave none of them" if stacks else "the model has none"
        yield Fault("transforms.float8.experts", f"= true converts stacked experts, but {there}", hint="remove it")
    if why := shares.float8_experts_refusal(experts, layout.etp):
        yield Fault("transforms.float8.experts", why)


def _key(reason: str) -> str:
    """The key that a reason begins with."""
    return re.split(r"[ ,]", reason, maxsplit=1)[0]
