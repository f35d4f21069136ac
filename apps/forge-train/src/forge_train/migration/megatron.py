"""Megatron-LM: the arguments of a pretraining script, from a shell script, an argument file, or YAML."""

import re
from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

from forge_train.migration.concepts import (
    Axes,
    RateCurve,
    Shape,
    decay_embeddings,
    write_axes,
    write_batch,
    write_micro_batch,
    write_schedule,
    write_start,
)
from forge_train.migration.engine import Framework, Migration, SourceSetting, Unread
from forge_train.migration.megatron_keys import KEYS
from forge_train.migration.megatron_model import translate_experts, translate_model
from forge_train.migration.nanogpt import plain_name, ratio
from forge_train.migration.shell import scalar

WARMUP = "step s of the warm-up has the factor (s + 1) / warmup in Forge, s / warmup there: the first rate is not 0"


def read_yaml(tree: Mapping[Any, Any]) -> tuple[dict[str, SourceSetting], list[Unread]]:
    """Reads arguments from a parsed YAML file: a table `MODEL_ARGS` of flags, or nested tables of names with underscores.

    A flag that is `false` counts as absent only if it has no value otherwise.
    """
    settings: dict[str, SourceSetting] = {}
    rest: list[Unread] = []
    found = tree.get("MODEL_ARGS")
    if isinstance(found, dict):
        why = "is no argument of the script"
        rest += [Unread(str(name), None, why) for name in tree if name != "MODEL_ARGS"]
        _collect(found, settings, rest)  # pyright: ignore[reportUnknownArgumentType]
    else:
        _collect(tree, settings, rest)
    return settings, rest


def _collect(tree: Mapping[Any, Any], settings: dict[str, SourceSetting], rest: list[Unread]) -> None:
    for name, value in tree.items():
        if isinstance(value, dict):
            _collect(value, settings, rest)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, str) and "$" in value:
            rest.append(
                Unread(f"{name}: {value}", None, "is filled in by the program that reads the file; set it in the recipe yourself")
            )
        else:
            key = str(name).lstrip("-").replace("_", "-")
            settings[key] = SourceSetting(scalar(value) if isinstance(value, str) else value)


def translate(migration: Migration) -> None:
    """Translates the keys with a rule."""
    name = migration.get("wandb-exp-name")
    migration.write("job.name", plain_name(str(name)) if name else migration.source.name, "wandb-exp-name")
    translate_model(migration)
    translate_experts(migration)
    axes = _layout(migration)
    _schedule(migration, _batch(migration, axes))
    _optimizer(migration)
    _precision(migration)
    _data(migration)
    _run(migration)


def _layout(migration: Migration) -> Axes:
    sizes = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
    keys = {axis: f"{name}-{'parallel-size' if axis == 'cp' else 'model-parallel-size'}" for axis, name in sizes.items()}
    axes = Axes(**{axis: migration.positive(key) for axis, key in keys.items()}, ep_is_an_axis=False)
    per_node, nodes = migration.get("nproc-per-node"), migration.get("nnodes")
    if _is_count(per_node) and (nodes is None or _is_count(nodes)):
        processes = per_node * (nodes or 1)
        if migration.world is None and processes % axes.others == 0:
            migration.world = processes
            note = f"the recipe is for {processes} processes"
        elif migration.world is None:
            note = f"{processes} processes do not fit axes of {axes.others}: give --world"
        else:
            note = f"the recipe is for --world {migration.world}"
        for key in ("nproc-per-node", "nnodes"):
            migration.write_nothing(key, note)
    write_axes(migration, axes, keys)
    experts = migration.get("expert-tensor-parallel-size")
    if axes.ep > 1 or experts is not None:
        size = migration.integer("expert-tensor-parallel-size") if experts is not None else axes.tp
        migration.write("parallel.etp", size, "expert-tensor-parallel-size")
    if axes.tp > 1:
        migration.write("transforms.tensor.sequence_parallel", migration.flag("sequence-parallel"), "sequence-parallel")
    else:
        migration.unused("sequence-parallel", because="tensor-model-parallel-size is 1")
    if axes.cp > 1:
        kinds = {"p2p": "ring", "all_gather": "all_gather", "a2a": "ulysses"}
        kind = migration.get("cp-comm-type")
        if kind in kinds:
            migration.write("transforms.context.kind", kinds[kind], "cp-comm-type")
        else:
            migration.cannot("cp-comm-type", "choose transforms.context.kind: ring, all_gather or ulysses")
    if axes.ep > 1:
        kinds = {"alltoall": "all_to_all", "allgather": "all_gather"}
        kind = migration.get("moe-token-dispatcher-type")
        if kind in kinds:
            migration.write("transforms.expert.dispatcher", kinds[kind], "moe-token-dispatcher-type")
        else:
            migration.cannot(
                "moe-token-dispatcher-type", "choose transforms.expert.dispatcher: all_to_all, all_gather or hierarchical"
            )
    _stages(migration, axes)
    return axes


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _stages(migration: Migration, axes: Axes) -> None:
    keys = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
    if axes.pp == 1:
        migration.unused(*keys, because="pipeline-model-parallel-size is 1")
        return
    if migration.get(keys[0]) is not None and migration.get("num-layers") is not None:
        each, layers = migration.integer(keys[0]), migration.integer("num-layers")
        count, key = layers // (axes.pp * max(each, 1)), keys[0]
    elif migration.get(keys[1]) is not None:
        count, key = migration.integer(keys[1]), keys[1]
    else:
        migration.write("parallel.pipeline.schedule.name", "1f1b")
        return
    if count < 2:
        migration.write("parallel.pipeline.schedule.name", "1f1b", key, note="one stage for each rank")
        return
    migration.write("parallel.pipeline.schedule.name", "interleaved", key)
    migration.write("parallel.pipeline.schedule.stages_per_rank", count, key, note="stages of each rank")


class Batches(NamedTuple):
    """Sequences per step, which may grow during a run.

    Attributes:
        sizes: (first step, sequences per step, sequences before this step) of each size, in order.
    """

    sizes: tuple[tuple[int, int, int], ...]

    @classmethod
    def ramp(cls, first: int, increment: int, samples: int, last: int) -> "Batches":
        """Returns the sizes `first`, `first + increment`, ... `last`, which share the first `samples` sequences evenly. A size
        begins with the first step before which its share has been read, as Megatron decides before each step."""
        sizes, increments = [(0, first, 0)], (last - first) // increment
        for number in range(1, increments + 1):
            step, batch, read = sizes[-1]
            steps = max(0, ceil(Fraction(number * samples - read * increments, increments * batch)))
            if not steps:  # a share of less than a batch
                sizes.pop()
            sizes.append((step + steps, first + number * increment, read + steps * batch))
        return cls(tuple(sizes))

    def steps(self, samples: int) -> int:
        """Returns the number of steps that read `samples` sequences, rounded up."""
        step, batch, read = [size for size in self.sizes if size[2] < samples or size[0] == 0][-1]
        return step + ceil((samples - read) / batch)

    def __str__(self) -> str:
        return "batch of " + " to ".join(dict.fromkeys(str(size) for _, size, _ in (self.sizes[0], self.sizes[-1])))


def _batch(migration: Migration, axes: Axes) -> Batches:
    if migration.get("micro-batch-size") is None:
        migration.fill_in(
            "train.micro_batch", 1, "sequences of one forward pass: the file has no readable --micro-batch-size", active=True
        )
        micro = 1
    else:
        micro = migration.positive("micro-batch-size")
    if migration.get("step-batch-size-schedule") is not None:
        what = "write [[data.phases]] with the start step and global_batch of each size; the final size is written"
        migration.cannot("step-batch-size-schedule", what)
    total = migration.get("global-batch-size")
    if total is None and (schedule := re.findall(r":(\d+)", str(migration.get("step-batch-size-schedule") or ""))):
        total = int(schedule[-1])
        migration.write("train.global_batch", total, note="the last size")
        migration.remark("train.global_batch", "the last size of step-batch-size-schedule")
    elif total is None:
        _ramp(migration, 0)
        write_batch(migration, micro, 1, axes, ("micro-batch-size",), "micro-batch-size", "micro-batch-size * data ranks")
        return Batches(((0, migration.recipe["train"]["global_batch"], 0),))
    else:
        total = migration.positive("global-batch-size")
    batches = _ramp(migration, total)
    if migration.get("global-batch-size") is not None:
        first = batches.sizes[0][1]
        migration.write("train.global_batch", first, "global-batch-size" if first == total else "rampup-batch-size")
        if first != total:
            migration.drop("global-batch-size", "the last of data.phases")
    ranks = axes.data_ranks(migration.world)
    if migration.get("micro-batch-size") is not None:
        if ranks is None:
            migration.write("train.micro_batch", micro, "micro-batch-size")
        else:
            write_micro_batch(migration, micro, batches.sizes[0][1], ranks, "micro-batch-size")
    return batches


def _ramp(migration: Migration, total: int) -> Batches:
    """Writes the phases of `rampup-batch-size`, whose last size is `total`."""
    key = "rampup-batch-size"
    values = migration.get(key)
    if values is None:
        return Batches(((0, total, 0),))
    given = values if isinstance(values, list) else [values]
    if not (len(given) == 3 and all(isinstance(value, int) and value >= 0 for value in given)):
        migration.cannot(key, "needs three whole numbers, the first size, the increment and sequences; the final size is written")
        return Batches(((0, total, 0),))
    first, increment, samples = given
    if not (0 < first < total and increment and (total - first) % increment == 0):
        what = f"{increment} does not lead from {first} to global-batch-size = {total or 'absent'}; the final size is written"
        migration.cannot(key, what)
        return Batches(((0, total, 0),))
    batches = Batches.ramp(first, increment, samples, total)
    for index, (step, size, _) in enumerate(batches.sizes[1:]):
        note = "" if index else f"{first} to {total} sequences in the first {samples:,}"
        migration.write(f"data.phases.{index}.start", step, key, note=note)
        migration.write(f"data.phases.{index}.global_batch", size, key)
    return batches


def _schedule(migration: Migration, batches: Batches) -> None:
    get = migration.get
    steps = _steps_of(migration, "train-iters", "train-samples", batches)
    end_key = "lr-decay-samples" if get("lr-decay-samples") is not None else "lr-decay-iters"
    end = _steps_of(migration, "lr-decay-iters", "lr-decay-samples", batches)
    if steps is None:
        what = "the file has no readable --train-iters or --train-samples"
        if end is None:
            migration.must_fill_in("train.max_steps", what)
            _open_schedule(migration)
            return
        migration.fill_in("train.max_steps", end, f"{what}; here as long as the decay", active=True)
        steps = end
    else:
        key = "train-iters" if get("train-iters") is not None else "train-samples"
        note = "" if key == "train-iters" else f"samples divided by the {batches}, rounded up"
        migration.write("train.max_steps", steps, key, note=note)
    end = end or steps
    if get("lr-warmup-fraction") is not None:
        warmup_key, warmup = "lr-warmup-fraction", round(migration.number("lr-warmup-fraction") * end)
        note = f"{get(warmup_key)} of the {end} steps of the decay; {WARMUP}"
    elif get("lr-warmup-samples"):
        warmup_key, warmup = "lr-warmup-samples", batches.steps(migration.integer("lr-warmup-samples"))
        note = f"samples divided by the {batches}; {WARMUP}"
    else:
        warmup_key, warmup, note = "lr-warmup-iters", migration.integer("lr-warmup-iters"), WARMUP
    if migration.number("lr-warmup-init") > 0:
        migration.cannot("lr-warmup-init", "a warm-up begins with 1 / warmup of the rate")
    names = {"name": "lr-decay-style", "warmup": warmup_key, "floor": "min-lr"}
    if migration.has(end_key):
        names["end"] = end_key
    floor = ratio(migration.number("min-lr"), migration.number("lr")) if get("lr") is not None else 0.0
    style = get("lr-decay-style")
    wsd_keys = ("lr-wsd-decay-style", "lr-wsd-decay-iters", "lr-wsd-decay-samples")
    if style == "constant":
        write_schedule(migration, RateCurve("constant", warmup, 0, 0), steps, names, note)
    elif style == "inverse-square-root":
        migration.write("schedule.name", "inverse_sqrt", "lr-decay-style")
        migration.write("schedule.warmup", warmup, warmup_key, note=note)
        if floor:
            migration.cannot("min-lr", "inverse_sqrt has no minimum")
    elif style in ("linear", "cosine"):
        shape: Shape = "linear" if style == "linear" else "cosine"
        write_schedule(migration, RateCurve(shape, warmup, warmup, end, floor), steps, names, note)
    elif style == "WSD":
        shapes: Mapping[Any, Shape] = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "one_minus_sqrt"}
        shape = shapes.get(get("lr-wsd-decay-style"), "linear")
        if get("lr-wsd-decay-style") not in shapes:
            migration.cannot(
                "lr-wsd-decay-style", "choose schedule.shape: linear, cosine, sqrt or one_minus_sqrt; linear is written"
            )
            migration.remark("schedule.shape", "FILL IN: Megatron's exponential decay has no counterpart")
        last = Batches(((0, batches.sizes[-1][1], 0),))  # a decay at the end of a run is in its last size
        length = _steps_of(migration, "lr-wsd-decay-iters", "lr-wsd-decay-samples", last)
        if length is None:
            migration.must_fill_in("schedule.decay", "the share of the run in which the rate decays")
            migration.write("schedule.name", "wsd", "lr-decay-style")
            migration.write("schedule.shape", shape, "lr-wsd-decay-style")
            migration.write("schedule.warmup", warmup, warmup_key, note=note)
            migration.write("schedule.min_ratio", floor, "min-lr")
            return
        names["begin"] = "lr-wsd-decay-samples" if get("lr-wsd-decay-samples") is not None else "lr-wsd-decay-iters"
        write_schedule(migration, RateCurve(shape, warmup, end - length, end, floor), steps, names, note)
        if shape == shapes.get(get("lr-wsd-decay-style")):
            migration.write("schedule.shape", shape, "lr-wsd-decay-style")
    else:
        migration.cannot("lr-decay-style", "choose [schedule] yourself")
    if style != "WSD":
        migration.unused(*wsd_keys, because=f"lr-decay-style is {style}")


def _open_schedule(migration: Migration) -> None:
    """Writes what is known of a schedule without the number of steps."""
    style = migration.get("lr-decay-style")
    names = {"constant": "constant", "linear": "linear", "cosine": "cosine", "inverse-square-root": "inverse_sqrt", "WSD": "wsd"}
    if style in names:
        migration.write("schedule.name", names[style], "lr-decay-style")
    else:
        migration.cannot("lr-decay-style", "choose [schedule] yourself")
    if migration.integer("lr-warmup-iters"):
        migration.write("schedule.warmup", migration.integer("lr-warmup-iters"), "lr-warmup-iters", note=WARMUP)
    elif migration.get("lr-warmup-fraction") or migration.get("lr-warmup-samples"):
        migration.must_fill_in("schedule.warmup", "steps of the warm-up")
        for key in ("lr-warmup-fraction", "lr-warmup-samples"):
            migration.drop(key, "fill in schedule.warmup when the number of steps is known")
    if style in ("linear", "cosine", "WSD") and migration.get("lr") is not None:
        floor = ratio(migration.number("min-lr"), migration.number("lr"))
        migration.write("schedule.min_ratio", floor, "min-lr", note="min-lr / lr")
    if style == "WSD":
        migration.must_fill_in("schedule.decay", "the share of the run in which the rate decays")
        for key in ("lr-wsd-decay-style", "lr-wsd-decay-iters", "lr-wsd-decay-samples"):
            migration.drop(key, "fill in [schedule] when the number of steps is known")


def _steps_of(migration: Migration, iterations: str, samples: str, batches: Batches) -> int | None:
    if migration.get(iterations) is not None:
        return migration.positive(iterations)
    return None if migration.get(samples) is None else batches.steps(migration.positive(samples))


def _optimizer(migration: Migration) -> None:
    get, name = migration.get, str(migration.get("optimizer"))
    muon = "muon" in name
    if name == "adam" or muon:
        migration.write(
            "optimizer.name", "muon" if muon else "adamw", "optimizer", note="" if muon else "decoupled weight decay in both"
        )
    else:
        migration.cannot("optimizer", "Forge has adamw, adamw8bit, lion, muon and schedule_free_adamw; adamw is written")
        migration.write("optimizer.name", "adamw")
    prefix = "optimizer.adamw_" if muon else "optimizer."
    migration.write(
        f"{prefix}betas", [migration.number("adam-beta1"), migration.number("adam-beta2")], "adam-beta1", "adam-beta2"
    )
    migration.write(f"{prefix}eps", migration.number("adam-eps"), "adam-eps")
    if muon:
        migration.write("optimizer.momentum", migration.number("muon-momentum"), "muon-momentum")
        migration.write("optimizer.newton_schulz_steps", migration.integer("muon-num-ns-steps"), "muon-num-ns-steps")
    if get("lr") is None:
        migration.must_fill_in("optimizer.lr", "the file has no readable --lr")
    decay_embeddings(migration, migration.number("weight-decay"), "weight-decay", "Megatron")
    if get("decoupled-lr") is not None and get("lr"):
        factor = ratio(migration.number("decoupled-lr"), migration.number("lr"))
        note = "a factor of the rate for embedding and head: decoupled-lr / lr"
        groups = migration.recipe.get("parameters", {}).get("groups", [])
        names = ["embed.weight", *(["head.weight"] if not migration.recipe["model"]["tied_embeddings"] else [])]
        for index, match in enumerate(names, len(groups)):
            migration.write(f"parameters.groups.{index}.match", match)
            migration.write(f"parameters.groups.{index}.lr", factor, "decoupled-lr", note=note)
    clip = migration.number("clip-grad")
    migration.write(
        "train.grad_clip", clip if clip > 0 else "none", "clip-grad", note="" if clip > 0 else "0 switches clipping off there"
    )


def _precision(migration: Migration) -> None:
    if migration.flag("fp16"):
        migration.cannot("fp16", "fp16 needs a loss scaler, which Forge does not have; bf16 is written")
        migration.write("precision.compute", "bf16")
    elif migration.flag("bf16"):
        migration.write("precision.compute", "bf16", "bf16")
    else:
        migration.write("precision.compute", "fp32", "bf16")
    migration.write("precision.state", "fp32")
    if migration.get("fp8-format") is not None:
        note = "tensorwise scales of torchao; the output head stays in bf16"
        migration.write("transforms.float8.recipe", "tensorwise", "fp8-format", note=note)
    granularity = migration.get("recompute-granularity")
    if granularity == "full":
        migration.write("transforms.recompute.policy", "full", "recompute-granularity")
    elif granularity == "selective" or migration.flag("recompute-activations"):
        note = "Forge keeps matrix products and attention; Megatron recomputes attention: other memory, the same result"
        migration.write("transforms.recompute.policy", "selective", "recompute-granularity", "recompute-activations", note=note)
    elif granularity is not None:
        migration.cannot("recompute-granularity", "choose transforms.recompute.policy: full or selective")
    interval = migration.integer("manual-gc-interval")
    if migration.flag("manual-gc"):
        note = "0 collects never there; Forge collects on all ranks at the same step"
        if interval:
            migration.write("train.collect_every", interval, "manual-gc-interval", "manual-gc")
        else:
            migration.write("train.collect_every", 50, "manual-gc", note=note)
    migration.write(
        "parallel.timeout",
        60.0 * migration.number("distributed-timeout-minutes"),
        "distributed-timeout-minutes",
        note="in seconds",
    )


def _paths(value: Any) -> list[tuple[float, str]]:
    """Returns weights and prefixes of `--data-path`: one prefix, or weights and prefixes in turn, or prefixes."""
    items = value if isinstance(value, list) else [value]
    pairs = list(zip(items[::2], items[1::2], strict=False))
    if len(items) % 2 == 0 and items and all(isinstance(weight, int | float) for weight, _ in pairs):
        return [(float(weight), str(prefix)) for weight, prefix in pairs]
    return [(1.0, str(prefix)) for prefix in items]


def _data(migration: Migration) -> None:
    reset = migration.flag("reset-position-ids") and migration.flag("reset-attention-mask")
    migration.write("data.documents", "mask" if reset else "ignore", "reset-position-ids", "reset-attention-mask")
    key = next((name for name in ("data-path", "train-data-path") if migration.get(name) is not None), None)
    if key is not None:
        for index, (weight, prefix) in enumerate(_paths(migration.get(key))):
            migration.write(f"data.sources.{index}.name", "megatron", key)
            migration.write(f"data.sources.{index}.path", prefix, key)
            migration.write(f"data.sources.{index}.weight", weight, key)
    elif migration.flag("mock-data") and "vocab_size" in migration.recipe["model"]:
        migration.write("data.sources.0.name", "random", "mock-data")
        migration.write("data.sources.0.vocab_size", migration.recipe["model"]["vocab_size"], "mock-data")
    else:
        migration.write("data.sources.0.name", "megatron")
        migration.fill_in(
            "data.sources.0.path", "corpus_text_document", "the prefix of the indexed data (.bin and .idx)", active=True
        )
    if migration.get("valid-data-path") is not None:
        for index, (_, prefix) in enumerate(_paths(migration.get("valid-data-path"))):
            migration.write(f"data.evaluation.validation{index or ''}.name", "megatron", "valid-data-path")
            migration.write(f"data.evaluation.validation{index or ''}.path", prefix, "valid-data-path")
    if migration.has("split"):
        migration.cannot(
            "split",
            "Forge splits no indexed data: write the held-out documents to a file of their own, as [data.evaluation.NAME]",
        )


def _run(migration: Migration) -> None:
    write_start(migration, migration.integer("log-interval"), "log-interval")
    if "evaluation" in migration.recipe["data"]:
        migration.hook("evaluate", every=(migration.integer("eval-interval"), "eval-interval"))
    else:
        migration.drop("eval-interval", 'name a held-out set in [data.evaluation.NAME], and add [[hooks]] name = "evaluate"')
    if migration.flag("profile"):
        first, last = migration.integer("profile-step-start"), migration.integer("profile-step-end")
        fields: dict[str, tuple[Any, str]] = {
            "at": ([max(first, 1)], "profile-step-start"),
            "steps": (max(last - first, 1), "profile-step-end"),
        }
        ranks = migration.get("profile-ranks")
        if ranks is not None:
            fields["ranks"] = (ranks if isinstance(ranks, list) else [ranks], "profile-ranks")
        migration.hook("profile", "profile", more=fields)
    else:
        migration.unused("profile-step-start", "profile-step-end", "profile-ranks", because="profile is not set")
    if migration.get("save-interval") is not None:
        migration.write("checkpoint.every", migration.integer("save-interval"), "save-interval")
    keep = migration.integer("most-recent-k")
    migration.write("checkpoint.keep", max(keep, 0), "most-recent-k", note="0 keeps all" if keep < 0 else "")
    migration.hook("save")
    migration.drop("save", "checkpoints are in the run's directory, runs/NAME; set job.dir for another one")
    if migration.get("wandb-project"):
        fields = {"project": (migration.get("wandb-project"), "wandb-project")}
        if migration.get("wandb-entity"):
            fields["entity"] = (migration.get("wandb-entity"), "wandb-entity")
        migration.table("trackers", "wandb", more=fields)
    if migration.get("tensorboard-dir"):
        migration.table(
            "trackers", "tensorboard", "tensorboard-dir", note="event files are in tensorboard/ of the run's directory"
        )


MEGATRON = Framework(
    "megatron",
    "Megatron-LM",
    "a shell script or a text file with arguments such as --num-layers 32, or YAML with the same names",
    KEYS,
    translate,
)
