"""What all frameworks configure in their own ways: the layout, the batch, the schedule and the weight decay of a recipe."""

from dataclasses import dataclass
from math import lcm, prod
from typing import Literal

from forge_core.errors import ForgeError
from forge_train.migration.engine import Migration

Shape = Literal["constant", "linear", "cosine", "sqrt", "one_minus_sqrt"]


@dataclass(frozen=True)
class Axes:
    """Sizes of the parallel axes of a source.

    Attributes:
        dp_shard: data ranks over which parameters are sharded; -1 if the framework takes all ranks that the other axes leave.
        ep: expert ranks. They are part of the data ranks, unless `ep_is_an_axis`.
        ep_is_an_axis: whether the number of processes is a multiple of `ep` (each expert rank reads the same data).
    """

    dp_shard: int = -1
    dp_replicate: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    ep_is_an_axis: bool = False

    @property
    def others(self) -> int:
        """Number of processes of one data-parallel rank."""
        return self.tp * self.cp * self.pp * (self.ep if self.ep_is_an_axis else 1)

    def data_ranks(self, world: int | None) -> int | None:
        """Returns the number of ranks that read different data; None if neither the axes nor `world` say it.

        Raises:
            ForgeError: the axes do not fit the number of processes.
        """
        if self.dp_shard > 0:
            ranks = self.dp_replicate * self.dp_shard
            if world not in (None, ranks * self.others):
                raise ForgeError(f"--world {world}: the axes of the file need {ranks * self.others} processes; leave --world out")
            return ranks
        if world is None:
            return None
        if world % (self.others * self.dp_replicate):
            raise ForgeError(
                f"--world {world}: the axes of the file need a multiple of {self.others * self.dp_replicate} processes"
            )
        return world // self.others


def write_batch(
    migration: Migration, micro: int, accumulation: int, axes: Axes, keys: tuple[str, ...], micro_key: str, note: str
) -> None:
    """Writes `train.global_batch` from a micro-batch, accumulation steps and data ranks.

    Without a known number of data ranks, the value is that of one replica and must be filled in.

    Args:
        micro: sequences of one forward pass of a data rank.
        accumulation: forward passes of a data rank for one optimizer step.
        keys: keys of the framework from which the global batch follows.
        micro_key: key of the micro-batch.
        note: the formula.
    """
    ranks = axes.data_ranks(migration.world)
    each = micro * accumulation
    if ranks is None:
        least = axes.dp_replicate
        migration.write("train.global_batch", each * least, *keys, note=note)
        migration.fill_in(
            "train.global_batch",
            each * least,
            f"{each} for each data rank, here for {least}; multiply, or migrate with --world N",
            active=True,
        )
        ranks = least
    else:
        migration.write("train.global_batch", each * ranks, *keys, note=note)
        migration.remark("train.global_batch", f"{micro} sequences * {accumulation} micro-batches * {ranks} data ranks")
    write_micro_batch(migration, micro, each * ranks, ranks * (axes.ep if axes.ep_is_an_axis else 1), micro_key)


def write_micro_batch(migration: Migration, micro: int, global_batch: int, ranks: int, key: str) -> None:
    """Writes `train.micro_batch`: that of the source, or the next smaller one with which all ranks get equal shares."""
    share, rest = divmod(global_batch, ranks)
    if rest or share % micro == 0:
        migration.write("train.micro_batch", micro, key)
        return
    fitting = max(size for size in range(1, micro + 1) if share % size == 0)
    note = f"{micro} does not divide the {share} sequences of a data rank, so the next smaller divisor is written"
    migration.write("train.micro_batch", fitting, key, note=note)


def write_axes(migration: Migration, axes: Axes, keys: dict[str, str]) -> None:
    """Writes `[parallel]`; `keys` maps an axis to the key that it comes from. Axes of size 1 are written if the file has them."""
    for axis in ("dp_shard", "dp_replicate", "tp", "cp", "pp", "ep"):
        key, size, note = keys.get(axis, ""), getattr(axes, axis), ""
        if axis == "dp_shard" and axes.ep_is_an_axis and axes.ep > 1 and size > 0:
            size *= axes.ep
            note = "in Forge, expert ranks are data ranks, so dp_shard includes them; every rank reads its own data"
        if axis == "ep" and axes.ep_is_an_axis and size > 1:
            note = "in Forge, expert ranks are data ranks: they read different data and are part of dp_shard"
        if key:
            migration.write(f"parallel.{axis}", size, key, note=note)


@dataclass(frozen=True)
class RateCurve:
    """A schedule of a source: a linear warm-up, the full rate up to `begin`, and a decay that reaches `floor` at `end`.

    Steps count from 0; `floor` is relative to the full rate.
    """

    shape: Shape
    warmup: int
    begin: int
    end: int
    floor: float = 0.0


def write_schedule(migration: Migration, curve: RateCurve, steps: int, keys: dict[str, str], warmup_note: str = "") -> None:
    """Writes `[schedule]`, and a longer `train.max_steps` with `train.stop_at` if the decay goes on after the last step.

    Args:
        steps: optimizer steps of the run.
        keys: the keys of the framework for `name`, `warmup`, `end`, `begin` and `floor`; names may be missing.
        warmup_note: what differs in the warm-up.
    """
    warmup_keys = [keys["warmup"]] if "warmup" in keys else []
    name_keys = [keys["name"]] if "name" in keys else []
    end_keys = [keys[name] for name in ("end", "begin") if name in keys]
    least = curve.warmup if curve.shape == "constant" else curve.warmup + 1
    last = least if curve.shape == "constant" else max(curve.end, least)
    if last > steps:
        note = "the schedule is longer than the run, which stops at train.stop_at"
        migration.write("train.max_steps", last, *(key for key in (*end_keys, *warmup_keys) if migration.has(key)), note=note)
        migration.write("train.stop_at", steps)
        migration.remark("train.stop_at", "last step of the run; the schedule follows train.max_steps")
    if curve.shape == "constant":
        migration.write("schedule.name", "constant", *name_keys)
        migration.write("schedule.warmup", curve.warmup, *warmup_keys, note=warmup_note)
        migration.unused(*end_keys, *([keys["floor"]] if "floor" in keys else []), because="the rate is constant")
        return
    end = max(last, steps)
    if curve.end < steps:
        note = (
            f"the rate reaches its minimum at step {curve.end} and stays there; schedules of Forge decay until train.max_steps = "
            f"{steps}, which is written; set train.max_steps = {curve.end} for the same curve and a shorter run"
        )
        for key in end_keys if any(migration.has(key) for key in end_keys) else name_keys:
            migration.cannot(key, note)
    begin = min(max(curve.begin, curve.warmup), end - 1)
    whole = begin <= curve.warmup and curve.shape in ("linear", "cosine")
    migration.write("schedule.name", curve.shape if whole else "wsd", *name_keys)
    migration.write("schedule.warmup", curve.warmup, *warmup_keys, note=warmup_note)
    if not whole:
        migration.write("schedule.shape", curve.shape, *name_keys)
        begin_keys = end_keys if curve.end == steps else []
        text = f"{end - begin} of {end} steps; Forge's key is a share of the run"
        migration.write("schedule.decay", (end - begin) / end, *begin_keys, note=text)
        migration.remark("schedule.decay", f"{end - begin} of {end} steps")
    elif curve.end == steps:
        for key in end_keys:
            if migration.has(key):
                migration.write("train.max_steps", steps, key, note="the decay lasts until the end of the run in Forge")
    migration.write("schedule.min_ratio", curve.floor, *([keys["floor"]] if "floor" in keys else []))


def decay_embeddings(migration: Migration, decay: float, key: str, title: str) -> None:
    """Adds groups of parameters for a source that decays embeddings, which Forge does not decay by default."""
    if decay > 0:
        note = f"{title} also decays the embedding table, which Forge does not; [[parameters.groups]] adds it"
        migration.write("optimizer.weight_decay", decay, key, note=note)
        learned = migration.recipe.get("model", {}).get("learned_positions")
        for number, name in enumerate(["embed.weight", *(["positions.weight"] if learned else [])]):
            migration.write(f"parameters.groups.{number}.match", name)
            migration.write(f"parameters.groups.{number}.weight_decay", decay)
        migration.remark("parameters.groups.0.match", f"{title} decays embeddings, Forge does not by default")
    else:
        migration.write("optimizer.weight_decay", decay, key)


def learned_positions(migration: Migration, *keys: str) -> None:
    """Writes learned positions, and attention without rotary ones."""
    migration.write("model.learned_positions", True, *keys)
    migration.write("model.attention.nope_every", 1)
    migration.remark("model.attention.nope_every", "no layer has rotary positions")


def write_start(migration: Migration, log_every: int | None, log_key: str = "") -> None:
    """Adds the hooks that every run needs."""
    migration.hook("log", more={"every": (log_every, log_key)} if log_every else None)
    migration.hook("progress")


def world_of(migration: Migration) -> int:
    """Returns the number of processes that a recipe is written for: the user's, or else the least that its axes allow."""
    if migration.world is not None:
        return migration.world
    parallel = migration.recipe.get("parallel", {})
    shard = parallel.get("dp_shard", -1)
    sizes = [parallel.get(axis, 1) for axis in ("dp_replicate", "tp", "cp", "pp")]
    least = prod(sizes) * max(shard, 1)
    experts = parallel.get("ep", 1) * parallel.get("etp", 1)
    if shard > 0 or experts == 1:
        return least
    inner = parallel.get("cp", 1) * parallel.get("tp", 1)
    return least * (lcm(experts, inner) // inner)
