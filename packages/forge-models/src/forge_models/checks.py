"""Rules across sections for models: pure functions of (job, layout), which run before torch is imported."""

from collections.abc import Iterator, Mapping
from typing import Any

from forge_core.component import class_name
from forge_core.errors import Fault, RecipeWarning
from forge_core.layout import Layout, divisors
from forge_core.protocols.run import Job
from forge_core.specs import Matrix
from forge_models.base_format import NF4_BLOCK
from forge_models.components.attentions import GQA
from forge_models.components.experts import MoEConfig
from forge_models.components.lora import LoRAConfig
from forge_models.components.recurrent import RecurrentLayer
from forge_models.components.transformers import TransformersConfig
from forge_models.hf.causal_lm_classes import folder_refusal, record_of

WHOLE_ROWS = 8
"""Number of bf16 values in 16 bytes."""


def experts_fit(job: Job, layout: Layout) -> Iterator[Fault]:
    """Checks that experts divide evenly over the ranks of `parallel.ep`, and their width over those of `parallel.etp`."""
    if layout.ep * layout.etp == 1:
        return
    moe = getattr(job.model, "moe", None)
    model: Any = job.model
    experts = getattr(model, "experts", 0)  # stacked experts of a class of transformers
    if experts and layout.etp == 1:
        if experts % layout.ep:
            legal = ", ".join(str(n) for n in divisors(experts))
            yield Fault("parallel.ep", f"{experts} experts do not divide over {layout.ep} ranks", hint=f"it may be {legal}")
        return
    if not isinstance(moe, MoEConfig):
        key = "ep" if layout.ep > 1 else "etp"
        yield Fault(
            f"parallel.{key}", "expert parallelism needs a model with experts", hint=f"set parallel.{key} = 1, or add [model.moe]"
        )
        return
    if moe.experts % layout.ep:
        legal = ", ".join(str(n) for n in divisors(moe.experts))
        yield Fault(
            "model.moe.experts",
            f"{moe.experts} experts do not divide over parallel.ep = {layout.ep} ranks",
            hint=f"parallel.ep may be {legal}",
        )
    width = moe.shape(model.shape.ffn_dim).ffn_dim
    if width % layout.etp:
        key = "model.ffn_dim" if moe.ffn_dim is None else "model.moe.ffn_dim"
        yield Fault(key, f"the expert width {width} must be a multiple of parallel.etp = {layout.etp}")


def experts_see_other_tokens(job: Job, layout: Layout) -> Iterator[Fault]:
    """Checks that ranks that share a row pass different tokens to experts, and that `losses.pooled` has all layers' loads."""
    moe = getattr(job.model, "moe", None)
    if not isinstance(moe, MoEConfig):
        return
    tensor = job.transforms.get("tensor")
    if layout.tp > 1 and tensor is not None and not tensor.sequence_parallel:
        yield Fault(
            "transforms.tensor.sequence_parallel",
            f"= false with [model.moe]: all {layout.tp} ranks of parallel.tp would give the same tokens to the experts",
            hint="set it to true, or parallel.tp = 1",
        )
    cutting = [f"parallel.{axis} = {layout.size(axis)}" for axis in ("pp", "cp", "tp", "ep", "etp") if layout.size(axis) > 1]
    cutting += ["[transforms.compile]"] if "compile" in job.transforms else []
    if moe.losses.pooled and cutting:
        yield Fault(
            "model.moe.losses.pooled",
            f"needs the loads of all layers, which is proven for data parallelism only, not with {' and '.join(cutting)}",
            hint="set it to 0 and use losses.global_batch, which is the same in every layout",
        )


def layers_share_a_stage(job: Job, layout: Layout) -> Iterator[Fault]:
    """Checks that what layers take besides the residual stream is on their stage of a pipeline, and that such layers are not
    compiled."""
    inputs = getattr(job.model, "layer_inputs", None)
    if layout.pp > 1 and inputs is not None:
        yield Fault(
            "model.layer_inputs",
            "are made from embedded tokens, which only the first stage of a pipeline has",
            hint="set parallel.pp = 1, or remove [model.layer_inputs]",
        )
    if inputs is not None and "compile" in job.transforms:
        yield Fault(
            "model.layer_inputs",
            "are not proven with compilation",
            hint="remove [transforms.compile], or [model.layer_inputs]",
        )
    shared = getattr(getattr(getattr(job.model, "shape", None), "attention", None), "shared_kv_layers", 0)
    if layout.pp > 1 and shared:
        yield Fault(
            "model.attention.shared_kv_layers",
            f"= {shared}: these layers take keys and values of earlier ones, which a pipeline has on other stages",
            hint="set parallel.pp = 1, or shared_kv_layers = 0",
        )
    if shared and "compile" in job.transforms:
        yield Fault(
            "model.attention.shared_kv_layers",
            f"= {shared} is not proven with compilation: blocks that give, take or keep keys and values are compiled separately, "
            "in training and in evaluation, and torch limits their number",
            hint="remove [transforms.compile], or set shared_kv_layers = 0",
        )


def recurrent_kernels_fit(job: Job, layout: Layout) -> Iterator[Fault]:  # noqa: ARG001 (every check receives both)
    """Checks that kernels of flash-linear-attention are neither compiled nor asked for fp64 or for the same bits each time."""
    attention: Any = getattr(job.model, "attention", None)
    for part, key in ((attention, "kernel"), (getattr(attention, "recurrent", None), "recurrent.kernel")):
        if not isinstance(part, RecurrentLayer) or part.kernel == "torch":
            continue
        name, hint = f"model.attention.{key}", f"set model.attention.{key} = 'torch'"
        if "compile" in job.transforms:
            yield Fault(name, "= 'fla' cannot be compiled", hint=f"{hint}, or remove [transforms.compile]")
        if job.precision.compute == "fp64":
            yield Fault(name, "= 'fla' has no fp64", hint=f"{hint}, or precision.compute = 'bf16'")
        if job.train.deterministic:
            yield Fault(
                name,
                "= 'fla' chooses its tiles by timing them, so a second run has other bits",
                hint=f"{hint}, or train.deterministic = false",
            )


def experts_compile(job: Job, layout: Layout) -> Iterator[Fault]:  # noqa: ARG001 (every check receives both)
    """Checks that experts can be compiled: one grouped product, in bf16, with rows that are multiples of 16 bytes."""
    moe = getattr(job.model, "moe", None)
    if not isinstance(moe, MoEConfig) or "compile" not in job.transforms:
        return
    if moe.kernel == "loop":
        yield Fault("model.moe.kernel", "'loop' reads loads on the host and cannot be compiled", hint="set it to 'auto'")
    if job.precision.compute != "bf16":
        yield Fault(
            "precision.compute",
            f"experts compile in bf16 only, not in {job.precision.compute}",
            hint="set it to 'bf16', or leave out [transforms.compile]",
        )
    width = moe.shape(job.model.shape.ffn_dim).ffn_dim
    for key, size in (("model.dim", job.model.dim), ("model.ffn_dim" if moe.ffn_dim is None else "model.moe.ffn_dim", width)):
        if size % WHOLE_ROWS:
            yield Fault(key, f"{size} must be a multiple of {WHOLE_ROWS} for compiled experts")


def objective_fits(job: Job, layout: Layout) -> Iterator[Fault]:
    """Checks that an objective gets the whole rows and the whole vocabulary that it needs, and that multi-token prediction has
    labels of next tokens."""
    objective, name = job.objective, class_name(job.objective)
    if layout.cp > 1 and getattr(objective, "whole_rows", False):
        what = f"{layout.cp} ranks would each have a part of a row, but objective {name} needs whole rows"
        yield Fault("parallel.cp", what, hint="set it to 1; use parallel.tp or parallel.pp for long rows")
    if layout.tp > 1 and getattr(objective, "whole_vocabulary", False):
        what = f"{layout.tp} ranks would each have a part of the vocabulary, but objective {name} compares whole distributions"
        yield Fault("parallel.tp", what, hint="set it to 1; use parallel.dp_shard or parallel.pp for large models")
    yield from _labels_fit(job, layout)
    if getattr(job.model, "mtp", None) is not None and not getattr(objective, "predicts_next", True):
        yield Fault(
            "model.mtp", f"predicts tokens after the next one, but objective {name} does not train next tokens", hint="remove it"
        )


def _labels_fit(job: Job, layout: Layout) -> Iterator[Fault]:
    objective, name = job.objective, class_name(job.objective)
    labels = getattr(job.model, "labels", ())
    if not getattr(objective, "classifies", False):
        if labels:
            what = f"trains next tokens or answers, but model.labels makes the model a classifier of {len(labels)} labels"
            yield Fault("objective.name", what, hint="set it to 'classification', or remove model.labels")
        return
    if not labels:
        if hasattr(job.model, "labels"):
            what = f"is missing, but objective {name} needs the names of the labels"
            yield Fault("model.labels", what, hint="list them in the order of their numbers, such as ['negative', 'positive']")
        else:
            what = f"{class_name(job.model)!r} has no classifier, which objective {name} trains"
            yield Fault(
                "model.name", what, hint="use model.name = 'decoder', which reads the folders of many families by from_hf"
            )
        return
    weights = getattr(objective, "class_weights", ())
    if weights and len(weights) != len(labels):
        what = f"has {len(weights)} weights for {len(labels)} labels"
        yield Fault("objective.class_weights", what, hint="give one for each of model.labels, in their order")
    if layout.tp > 1 and _last_share(len(labels), layout.tp) >= len(labels):
        what = f"{layout.tp} ranks cannot share {len(labels)} labels: the last would have none"
        yield Fault("parallel.tp", what, hint="lower it, and use parallel.dp_shard or parallel.pp for large models")
    for index, hook in enumerate(getattr(job, "hooks", ())):
        if getattr(hook, "generates", False):
            what = f"{class_name(hook)} asks for next tokens, which a classifier does not predict"
            yield Fault(f"hooks.{index}.name", what, hint="remove the hook; hook 'evaluate' reports the accuracy")


def _last_share(size: int, ranks: int) -> int:
    """Returns where the last of equal shares begins."""
    return -(-size // ranks) * (ranks - 1)


def direction_fits(job: Job, layout: Layout) -> Iterator[Fault]:  # noqa: ARG001 (every check receives both)
    """Checks that an objective of masked tokens has a bidirectional model, that one of next tokens has a causal one, and that
    ids are in the vocabulary."""
    objective, name, model = job.objective, class_name(job.objective), job.model
    causal = getattr(getattr(model, "shape", None), "causal", True)
    key = "model.attention.causal"
    either = getattr(objective, "either_direction", False)
    if not causal and not either and not getattr(objective, "bidirectional", False):
        what = f"= false lets a token see the next one, which objective {name} predicts"
        yield Fault(key, what, hint="set it to true, or take objective 'masked_lm' or 'masked_diffusion'")
    if causal and getattr(objective, "bidirectional", False):
        if isinstance(getattr(getattr(model, "shape", None), "attention", None), GQA):
            what = f"= true hides the tokens after a masked one, but objective {name} fills it in from both sides"
            yield Fault(key, what, hint="set it to false")
        else:
            what = f"is causal, but objective {name} fills in tokens from both sides"
            yield Fault("model.name", what, hint="take a decoder with model.attention.name = 'gqa' and causal = false")
    for index, hook in enumerate(getattr(job, "hooks", ()) if not causal else ()):
        if getattr(hook, "generates", False):
            what = f"{class_name(hook)} generates text, which a model with {key} = false cannot"
            yield Fault(f"hooks.{index}.name", what, hint="remove the hook")
    rows = getattr(model, "vocab_size", None)
    for key in ("mask_id", "vocab_size"):
        used = getattr(objective, key, None)
        if isinstance(used, int) and isinstance(rows, int) and used + (key == "mask_id") > rows:
            what = f"{used} is not in the model's vocabulary of {rows} ids" if key == "mask_id" else f"{used} exceeds {rows}"
            yield Fault(f"objective.{key}", what, hint=f"lower it, or raise model.vocab_size = {rows}")


def adapters_fit(job: Job, layout: Layout) -> Iterator[Fault]:
    """Checks that adapters (`[model.lora]`) are supported in this layout, and with the other keys of the recipe."""
    lora = getattr(job.model, "lora", None)
    if not isinstance(lora, LoRAConfig):
        return
    of_class = isinstance(job.model, TransformersConfig)
    key = "folder" if of_class else "from_hf"
    if getattr(job.model, key, None) is None and getattr(getattr(job, "start", None), "weights", None) is None:
        yield RecipeWarning("model.lora", "has no base, so a run will not start", hint=f"set model.{key}, or start.weights")
    if of_class:
        hidden, experts = {}, {}  # those of a class are known when it is built
    else:
        shape = job.model.shape
        hidden, experts = shape.matrices() if shape.declares_matrices else ({}, {})
    adapted = [name for name in lora.matched([*hidden, *experts]) if name in experts] if experts else []
    if lora.dora and layout.tp > 1:
        yield Fault(
            "model.lora.dora",
            f"= true with parallel.tp = {layout.tp}: a rank does not have the whole rows whose lengths DoRA needs",
            hint="set parallel.tp = 1, or dora = false",
        )
    if adapted and layout.etp > 1:
        yield Fault(
            "model.lora.targets",
            f"include experts, such as {adapted[0]}, which parallel.etp = {layout.etp} splits; adapters of experts are not split",
            hint="set parallel.etp = 1, or leave experts out, such as targets = ['*.attention.*']",
        )
    if lora.base_format != "full":
        yield from _base_fits(lora.base_format, hidden, bool(experts), layout)
        if "compile" in job.transforms:
            yield Fault(
                "transforms.compile",
                f"has not been compared with model.lora.base_format = {lora.base_format!r}",
                hint="remove it, or use base_format = 'full'",
            )
    if "float8" in job.transforms:
        yield Fault(
            "transforms.float8", "multiplies whole layers in float8, and layers with adapters of [model.lora] are no such"
        )
    if adapted and "compile" in job.transforms and lora.rank % WHOLE_ROWS:
        yield Fault("model.lora.rank", f"{lora.rank} must be a multiple of {WHOLE_ROWS} for compiled experts")
    if getattr(getattr(job, "parameters", None), "width_base", None):
        yield Fault("parameters.width_base", "scales the training of a whole model, and [model.lora] trains an adapter only")


def _base_fits(kind: str, hidden: Mapping[str, Matrix], experts: bool, layout: Layout) -> Iterator[Fault]:
    """Checks that every rank has whole blocks of a quantized base, whose matrices outside of stacks are `hidden`."""
    for name, matrix in hidden.items() if kind == "nf4" else ():
        inputs, split = matrix.shape[1], matrix.dims[1] not in (None, "embed")
        if split and inputs % (layout.tp * NF4_BLOCK):
            yield Fault(
                "model.lora.base_format",
                f"'nf4' has blocks of {NF4_BLOCK} values of a row, and parallel.tp = {layout.tp} splits the {inputs} values of a "
                f"row of {name} inside a block",
                hint="use 'int8', or another parallel.tp",
            )
            break
    if experts and layout.etp > 1:
        yield Fault(
            "parallel.etp",
            f"= {layout.etp} splits the rows of experts, and model.lora.base_format = {kind!r} quantizes whole rows",
            hint="set parallel.etp = 1",
        )


def classes_are_compared(job: Job, layout: Layout) -> Iterator[Fault]:
    """Checks that a class of transformers has been compared with one process in the layout of a recipe, and with its packing."""
    if type(job.model) is not TransformersConfig:
        return
    if not (kind := job.model.model_type):
        yield Fault("model.folder", "is missing", hint="give a folder in the Hugging Face format, or model.config")
        return
    page = "docs/models/transformers.md lists the classes"
    if (found := record_of(kind)) is None:
        yield Fault("model.config", f"model_type {kind!r} has not been compared with transformers", hint=page)
        return
    name, record = found
    if record["alone"] is not True:
        yield Fault("model.config", f"{name} is refused: {record['alone']}", hint=page)
        return
    if job.model.weights_from == "folder" and (why := folder_refusal(kind)):
        yield Fault("model.folder", why, hint="set model.weights_from = 'draw'")
    data = getattr(job, "data", None)
    if getattr(data, "packing", "pad") != "pad" and record["packed"] is not True:
        hint = "set data.packing = 'pad', so that each row has one document"
        yield Fault("data.packing", f"{name} cannot have several documents in a row: {record['packed']}", hint=hint)
    sizes = {"dp": layout.dp_shard * layout.dp_replicate, "pp": layout.pp, "tp": layout.tp, "ep": layout.ep}
    for axis, size in sizes.items():
        if size > 1 and record[axis] is not True:
            key = "parallel.dp_shard" if axis == "dp" else f"parallel.{axis}"
            yield Fault(key, f"{name} is not offered with {axis} = {size}: {record[axis]}", hint=f"set it to 1; {page}")
