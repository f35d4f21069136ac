"""`forge-train plan RECIPE --world N`: memory, traffic and modeled time of a run, from one process without tensor memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console as Terminal
from rich.table import Table
from rich.text import Text

from forge_core.layout import DENSE, SPARSE, Layout
from forge_core.terminal import size
from forge_train.commands.options import RecipePath

if TYPE_CHECKING:
    from forge_core.registry import Registry
    from forge_core.terminal import Console
    from forge_parallel.dryrun.estimate import Estimate
    from forge_parallel.dryrun.parameters import ParameterPlacement
    from forge_parallel.dryrun.sharding import Recommendation
    from forge_parallel.dryrun.traffic import Flow
    from forge_parallel.timing.failures import SavePlan
    from forge_parallel.timing.hardware import Hardware
    from forge_parallel.timing.step_time import Efficiency, StepTime
    from forge_train.plan import DryRun
    from forge_train.recipe.load import Recipe
    from forge_train.recipe.schema import Job


def plan(
    context: typer.Context,
    recipe: RecipePath,
    world: Annotated[int, typer.Option("--world", min=1, help="Number of processes, one for each GPU.")] = 1,
    per_node: Annotated[
        int | None,
        typer.Option("--per-node", min=1, help="Processes per node. Default: those of the hardware, or 8.", show_default=False),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option("--rank", help="A rank to show; may be given several times. Default: one per pipeline stage."),
    ] = None,
    device: Annotated[
        Literal["cpu", "a100", "h100", "h200", "b200"],
        typer.Option("--device", help="Device whose attention to plan for; on GPUs, attention keeps no scores or masks."),
    ] = "cpu",
    modules: Annotated[
        bool, typer.Option("--modules", help="Show each parameter instead, with path, classes, placement and bytes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, with bytes as integers.")] = False,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="Model the time of a step: a100, h100, h200, b200, gb200, gb300, or a TOML file."),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Find the layouts with the shortest modeled step; needs --hardware.")
    ] = False,
    memory: Annotated[
        float | None, typer.Option("--memory", help="With --search: GiB that a rank may hold. Default: 90 % of the GPU's.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="With --search: number of layouts to show.")] = 5,
    imbalance: Annotated[
        float | None,
        typer.Option(
            "--imbalance", min=1.0, help="Tokens of the busiest expert rank over the mean; 1 is balanced. Default: 1.2."
        ),
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option("--calibrate", help="A run's directory, calibration.json or doctor.json to fit constants to; repeatable."),
    ] = None,
    constants: Annotated[Path | None, typer.Option("--constants", help="Constants of the model of time, as TOML.")] = None,
    write_constants: Annotated[
        Path | None, typer.Option("--write-constants", help="Write the constants used, for --constants.")
    ] = None,
    gpu_hours: Annotated[
        float | None, typer.Option("--gpu-hours", help="Hours between failures of one GPU. Default: 50,000.", show_default=False)
    ] = None,
    stall: Annotated[
        float | None, typer.Option("--stall", help="Seconds that a save stops training. Default: the copy to the host.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--page", help="Write a page with charts.")] = None,
) -> None:
    """Show the memory, traffic and modeled time of a recipe on N processes, before renting any.

    Draws which ranks form which group; then, per rank, bytes of parameters, gradients and optimizer state, of
    activations, and of every collective next to its lower bound. The recipe's own model, transforms and optimizer
    run for one step on tensors without memory, with a few of the equal blocks: this needs no GPU, no data, a few hundred
    MiB, and some seconds.

    With --hardware it also models the time of a step by cause, tokens per second, MFU, and how often to save; with --search
    it compares all layouts. Modeled times are not measured: the error on published runs is printed with them.

    Examples: forge-train plan 7b --world 64 --hardware h100 --parallel.dp_replicate=8
    forge-train plan 70b --world 512 --hardware h200 --search
    """
    from forge_core.errors import LayoutError
    from forge_core.registry import Registry
    from forge_core.terminal import Console
    from forge_train.commands.options import require_single_process
    from forge_train.recipe.load import load_recipe

    require_single_process("plan")
    registry = Registry()
    console = Console(as_json=as_json)
    options = {"--rank": ranks, "--modules": modules, "--device": device != "cpu", "--page": page}
    modeled = {"--imbalance": imbalance, "--calibrate": calibrate, "--constants": constants, "--write-constants": write_constants}
    saving = {"--gpu-hours": gpu_hours, "--stall": stall}
    if search:
        _refuse(
            options | saving, "--search compares layouts, and shows no single one; remove, or plan the layout that you choose:"
        )
    else:
        _refuse({"--memory": memory}, "add --search, or remove")
    if hardware is None:
        _refuse(modeled | saving | {"--search": search}, "add --hardware with the name of the GPU, or remove")
    else:
        _refuse({"--modules": modules, "--device": device != "cpu"}, "--hardware names the device and models times; remove")
    times = Times.of(hardware, per_node, constants, calibrate or [], write_constants, imbalance, registry, console)
    if search:
        _search(context, recipe, world, memory, top, times, registry, console, as_json)
        return
    resolved = load_recipe(recipe, context.args, world, registry, here=None)
    for warning in resolved.warnings:
        console.note(f"warning: {warning}")
    assert resolved.layout is not None, "a world was given"
    if outside := [rank for rank in ranks or () if not 0 <= rank < world]:
        raise LayoutError(f"--rank {outside[0]} does not exist: the ranks of {world} processes are 0 to {world - 1}")
    chosen = tuple(dict.fromkeys(ranks or ()))
    if modules:
        _show_modules(resolved, registry, chosen, recipe, console, as_json)
        return
    from forge_parallel.dryrun.fake_world import ACCELERATORS, Accelerator
    from forge_train.plan import dry_run

    gpu = times.hardware
    accelerator = ACCELERATORS.get(device) if gpu is None else Accelerator(gpu.name, gpu.memory)
    found = dry_run(resolved.job, resolved.layout, registry, times.per_node, chosen, accelerator)
    time = times.step(resolved.job, resolved.layout, console)
    saves = times.saves(found, gpu_hours, stall) if time is not None else None
    if page is not None:
        from forge_core.files import replace_file
        from forge_train.commands.modeled import page as as_page

        page.parent.mkdir(parents=True, exist_ok=True)
        replace_file(page, as_page(found, recipe, time, saves, times.efficiency).encode())
        console.note(f"wrote {page}")
    if as_json:
        console.document({"recipe": recipe, **found.as_json(), "modeled": times.as_json(time, saves)})
        return
    terminal = _terminal(160)
    draw(found, recipe, terminal)
    if time is not None and gpu is not None:
        from forge_train.commands.modeled import draw_saves, draw_time

        terminal.print()
        draw_time(time, gpu, times.efficiency, terminal)
        if saves is not None:
            draw_saves(saves, time, terminal)


def _refuse(given: Mapping[str, Any], why: str) -> None:
    """Refuses options that would have no effect.

    Raises:
        ForgeError: one of them is given.
    """
    from forge_core.errors import ForgeError

    if named := [name for name, value in given.items() if value not in (None, False, [])]:
        raise ForgeError(f"{why} {', '.join(named)}")


@dataclass(frozen=True)
class Times:
    """What a plan needs to model times: the hardware, None if it is unknown, and constants."""

    hardware: "Hardware | None"
    per_node: int
    efficiency: "Efficiency"
    imbalance: float

    @classmethod
    def of(
        cls,
        name: str | None,
        per_node: int | None,
        constants: Path | None,
        calibrate: list[Path],
        write: Path | None,
        imbalance: float | None,
        registry: "Registry",
        console: "Console",
    ) -> "Times":
        """Reads the hardware and the constants, and fits these.

        Raises:
            ForgeError: a file cannot be read; or constants are asked for without hardware.
        """
        from forge_core.errors import ForgeError
        from forge_core.files import replace_file
        from forge_parallel.timing.hardware import Hardware, UnknownHardware
        from forge_parallel.timing.step_time import Efficiency
        from forge_train.prediction import IMBALANCE, as_toml, calibrated, constants_of

        if imbalance is not None and imbalance == inf:
            raise ForgeError("--imbalance is finite: tokens of the busiest expert rank over the mean")
        hardware = None
        if name is not None:
            try:
                hardware = Hardware.load(name)
            except UnknownHardware as unknown:
                console.note(f"no modeled time: {unknown}")
        efficiency = Efficiency() if constants is None else constants_of(constants)
        if hardware is not None:
            hardware = replace(hardware, per_node=per_node or hardware.per_node)
            if calibrate:
                efficiency, runs = calibrated(calibrate, hardware, efficiency, registry)
                for run in runs:
                    console.note(
                        f"{run.name}: measured {run.measured:,.0f} tokens/s of a GPU, modeled {run.error(efficiency):+.1%}"
                    )
            if write is not None:
                write.parent.mkdir(parents=True, exist_ok=True)
                replace_file(write, as_toml(efficiency).encode())
        return cls(hardware, per_node or (hardware.per_node if hardware else 8), efficiency, imbalance or IMBALANCE)

    def step(self, job: "Job", layout: Layout, console: "Console") -> "StepTime | None":
        """Returns the modeled step; None, with the reason on the console, if it cannot be modeled."""
        from forge_core.errors import ForgeError
        from forge_train.prediction import ModeledRecipe

        if self.hardware is None:
            return None
        try:
            return ModeledRecipe(job).predict(job, layout, self.hardware, self.efficiency, self.imbalance)
        except ForgeError as refusal:
            console.note(f"no modeled time: {refusal}")
            return None

    def saves(self, plan: "DryRun", gpu_hours: float | None, stall: float | None) -> "SavePlan":
        """Returns when to save. A save stops training while a rank copies its state to its host.

        Raises:
            ForgeError: a number is not positive.
        """
        from forge_parallel.timing.failures import GPU_HOURS, best_interval

        assert self.hardware is not None, "times are modeled for some hardware"
        state = max(estimate.parameters + estimate.optimizer for estimate in plan.ranks)
        hours = GPU_HOURS if gpu_hours is None else gpu_hours
        return best_interval(plan.layout.world, state / self.hardware.host if stall is None else stall, gpu_hours=hours)

    def as_json(self, time: "StepTime | None", saves: "SavePlan | None") -> dict[str, Any] | None:
        """Returns plain data; None without a modeled step."""
        if self.hardware is None or time is None or saves is None:
            return None
        known = self.efficiency.error
        return {
            "hardware": self.hardware.name,
            **time.as_json(),
            "saves": {**vars(saves), "lost": saves.lost()},
            "constants": {name: value for name, value in vars(self.efficiency).items() if name != "error"},
            "error": None if known is None else vars(known),
        }


def _search(
    context: typer.Context,
    recipe: str,
    world: int,
    memory: float | None,
    top: int,
    times: Times,
    registry: "Registry",
    console: "Console",
    as_json: bool,
) -> None:
    from forge_core.errors import ForgeError
    from forge_parallel.timing.hardware import GIB
    from forge_train.commands.modeled import draw_search, search_as_json
    from forge_train.search import search

    if times.hardware is None:
        raise ForgeError("--search compares modeled times, and these need known hardware")
    if memory is not None and not 0 < memory < inf:
        raise ForgeError(f"--memory {memory}: the memory of a rank is positive and finite, in GiB")
    bound = None if memory is None else int(memory * GIB)
    gpu, constants = times.hardware, times.efficiency
    console.note(f"comparing layouts of {world:,} {gpu.name}; large worlds take up to a minute")
    found = search(recipe, context.args, world, registry, gpu, constants, memory=bound, wanted=top, imbalance=times.imbalance)
    if as_json:
        console.document({"recipe": recipe, "world": world, "hardware": gpu.name, **search_as_json(found)})
        return
    draw_search(found, recipe, world, gpu, constants, _terminal(160))


def _show_modules(
    resolved: "Recipe", registry: "Registry", ranks: tuple[int, ...], recipe: str, console: "Console", as_json: bool
) -> None:
    from dataclasses import asdict

    from forge_train.plan import placed_parameters

    assert resolved.layout is not None
    held = placed_parameters(resolved.job, resolved.layout, registry, ranks)
    if as_json:
        shown = {str(rank): [asdict(parameter) for parameter in parameters] for rank, parameters in held.items()}
        console.document({"recipe": recipe, "layout": resolved.layout.sizes(), "parameters": shown})
        return

    draw_modules(held, _terminal(250))


def _terminal(width: int) -> Terminal:
    """Returns the terminal to draw on; output that is not a terminal has `width` characters per line."""
    terminal = Terminal(markup=False, highlight=False)
    return terminal if terminal.is_terminal else Terminal(markup=False, highlight=False, width=width)


LETTERS = {"pp": "p", "dp_replicate": "r", "dp_shard": "s", "cp": "c", "tp": "t", "efsdp": "f", "ep": "e", "etp": "w"}
COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
SHOWN = 4
"""Maximum number of nodes drawn, and of columns of stages."""
NOTATION = (
    "Placements in torch's notation: S(d) is sharded along dimension d over the ranks of the axis, R is replicated on each rank, "
    "_S(d, n) is sharded within each of the n shards that a later axis makes of the same dimension."
)
BAR = 32
"""Length of the longest bar in characters."""


def draw(plan: "DryRun", recipe: str, out: Terminal) -> None:
    """Prints a plan."""
    layout, nodes = plan.layout, -(-plan.layout.world // plan.per_node)
    rows = plan.micro_batches * plan.rows * layout.data
    out.print(
        Text(f"{recipe} on {_many(layout.world, 'rank')}, {_many(nodes, 'node')} of {plan.per_node}: {layout}", style="bold")
    )
    out.print(
        f"A step: {rows:,} sequences of {plan.length:,} tokens; {_many(plan.micro_batches, 'micro-batch', 'es')} of {plan.rows} "
        f"on each of {_many(layout.data, 'data rank')}. Transforms: {', '.join(plan.transforms) or 'none'}."
    )
    parts = _map(layout, plan.per_node), [_axes(plan)] if plan.groups else [], *_ranks(plan)
    for part in (*parts, *([_recommended(plan.sharding, plan.accelerator.name)] if plan.sharding and plan.accelerator else [])):
        out.print()
        for item in part:
            out.print(item)
    out.print()
    out.print(Text(plan.method, style="dim"))


def draw_modules(held: "Mapping[int, Sequence[ParameterPlacement]]", out: Terminal) -> None:
    """Prints every parameter of each rank: its name, classes, shapes, placement and bytes."""
    for rank, parameters in held.items():
        total = sum(parameter.bytes for parameter in parameters)
        out.print(Text(f"Parameters of rank {rank}, {size(total)}", style="bold"))
        table = _table("parameter", "class", "shape", "held", "placement", "bytes")
        for parameter in parameters:
            shapes = ["x".join(map(str, shape)) for shape in (parameter.shape, parameter.local)]
            placement = ", ".join(parameter.placements) or "whole"
            table.add_row(parameter.name, " > ".join(parameter.classes), *shapes, placement, f"{parameter.bytes:,}")
        out.print(table)
        out.print()
    out.print(Text(NOTATION, style="dim"))


def _map(layout: Layout, per_node: int) -> Iterator[Text]:
    """Yields a line per node: coordinates that all its ranks share, a bar, and each rank with its other coordinates."""
    active = [axis for axis in DENSE if layout.size(axis) > 1]
    nodes = [range(start, min(start + per_node, layout.world)) for start in range(0, layout.world, per_node)]
    shown = range(len(nodes)) if len(nodes) <= SHOWN + 1 else [*range(SHOWN - 1), len(nodes) - 1]
    at = {rank: layout.coordinates(rank) for number in shown for rank in nodes[number]}
    # Expert axes are a second coordinate system for the same ranks.
    borrowed = [axis for axis in SPARSE if axis not in DENSE and layout.ep * layout.etp > 1 and layout.size(axis) > 1]
    drawn = [*active, *borrowed]
    varying = [axis for axis in drawn if any(len({at[rank][axis] for rank in nodes[n]}) > 1 for n in shown)]
    fixed = [axis for axis in drawn if axis not in varying]
    inner = borrowed[-1] if borrowed else active[-1] if active else None
    named = [f"{LETTERS[axis]} = {axis}" for axis in drawn]
    if inner is not None:
        yield Text(f"{', '.join(named)}; ranks of one color exchange over {inner}", style="dim")
    others = [axis for axis in (SPARSE if borrowed else DENSE) if layout.size(axis) > 1 and axis != inner]
    width = max(len(_cell(rank, at[rank], varying)) for rank in at)
    heads = {number: _head(number, at[nodes[number][0]], fixed) for number in shown}
    margin = max(map(len, heads.values()))
    before = -1
    for number in shown:
        if number != before + 1:
            yield Text(f"{'⋮':>{margin}}   {number - before - 1:,} more nodes", style="dim")
        line = Text(f"{heads[number]:<{margin}} │")
        for rank in nodes[number]:
            style = "" if inner is None else COLORS[_group(at[rank], others, layout) % len(COLORS)]
            line.append(f" {_cell(rank, at[rank], varying):<{width}} ", style=style).append("│")
        yield line
        before = number


def _head(number: int, at: dict[str, int], axes: Sequence[str]) -> str:
    return " ".join([f"node {number}", *(f"{LETTERS[axis]}{at[axis]}" for axis in axes)])


def _cell(rank: int, at: dict[str, int], axes: Sequence[str]) -> str:
    return " ".join([str(rank), *(f"{LETTERS[axis]}{at[axis]}" for axis in axes)])


def _group(at: dict[str, int], axes: Sequence[str], layout: Layout) -> int:
    """Returns the number of a rank's group: ranks with equal coordinates on `axes`."""
    number = 0
    for axis in axes:
        number = number * layout.size(axis) + at[axis]
    return number


def _axes(plan: "DryRun") -> Table:
    table = _table("axis", "size", "groups", "the first group", "reaches")
    for group in plan.groups:
        reach = "a node" if group.nodes == 1 else f"{group.nodes:,} nodes"
        table.add_row(group.axis, f"{group.size:,}", f"{group.groups:,}", listed(group.first), reach)
    return table


def listed(ranks: Sequence[int]) -> str:
    """Returns ranks as text: `0-7`, `0, 8, 16` or `0, 8 .. 504`."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    regular = all(b - a == step for a, b in pairwise(ranks))
    if regular and step == 1 and len(ranks) > 2:
        return f"{ranks[0]}-{ranks[-1]}"
    if regular and len(ranks) > 4:
        return f"{ranks[0]}, {ranks[1]} .. {ranks[-1]}"
    return ", ".join(map(str, ranks))


def _ranks(plan: "DryRun") -> Iterator[list[Table | Text]]:
    many = plan.ranks if len(plan.ranks) <= SHOWN else (*plan.ranks[: SHOWN - 1], plan.ranks[-1])
    left_out = len(plan.ranks) - len(many)
    memory = _memory(many, plan.layout)
    if plan.accelerator is not None:
        of = size(plan.accelerator.memory)
        memory.add_row(
            f"memory of {plan.accelerator.name}",
            *[of for _ in many],
            *((f"{plan.accelerator.memory:,}",) if len(many) == 1 else ()),
            Text("in all", style="dim"),
        )
    yield [memory, *([Text(f"{left_out} more ranks with --json", style="dim")] if left_out else [])]
    fullest = max(plan.ranks, key=lambda estimate: sum(estimate.peak.values()))
    yield [Text(f"The peak of rank {fullest.rank}, {size(sum(fullest.peak.values()))}", style="bold"), _peak(fullest)]
    for estimate in many:
        if flows := [flow for flow in estimate.flows if flow.axis != "self"]:
            yield [Text(f"Traffic of rank {estimate.rank} in a step", style="bold"), _traffic(flows, estimate)]


def _recommended(sharding: "Recommendation", device: str) -> list[Text]:
    """Returns the recommended values of `[transforms.shard]` as lines of a recipe, with the estimates behind them."""
    from forge_parallel.dryrun.sharding import USABLE, keys_of

    best, usable = sharding.best, f"{size(sharding.usable)}, {100 * USABLE:.0f} % of the memory of {device}"
    why = f"the least traffic among options that fit into {usable}"
    if not sharding.fits:
        why = f"the least memory, since no option fits into {usable}"
    lines = [Text(f"Recommended sharding, about {size(best.memory)}: {why}", style="bold")]
    lines += [Text(f"  {line}") for line in ("[transforms.shard]", *keys_of(best))]
    for option in (*sharding.proven, *sharding.unproven):
        if option == best:
            continue
        keys = ", ".join(keys_of(option))
        proof = ", not tested with the rest of this recipe" if option in sharding.unproven else ""
        lines.append(Text(f"{keys}: about {size(option.memory)}, {_compared(option.traffic, best.traffic)}{proof}", style="dim"))
    return lines


def _compared(traffic: int, best: int) -> str:
    if traffic == best:
        return "the same traffic"
    return f"{size(abs(traffic - best))} {'more' if traffic > best else 'less'} traffic in a step"


def _memory(ranks: "Sequence[Estimate]", layout: Layout) -> Table:
    one = len(ranks) == 1
    heads = [f"rank {estimate.rank}" + (f" p{estimate.at['pp']}" if layout.pp > 1 else "") for estimate in ranks]
    table = _table("memory", *heads, *(("bytes",) if one else ()), "")
    exact, within = "exact, between steps", "within a step"
    lines = [
        ("parameters", "parameters", exact),
        ("gradients", "gradients", "exact, after a backward"),
        ("optimizer state", "optimizer", exact),
        ("buffers", "buffers", exact),
        ("activations of a micro-batch", "activations", "kept for its backward, head excepted"),
        ("loss head keeps", "head", "for its backward"),
        ("loss head works with", "head_work", "at most, while it runs"),
        ("largest unit gathered", "gathered", within),
        ("largest gradient scattered", "reduced", within),
    ]
    for name, attribute, remark in lines:
        sizes = [getattr(estimate, attribute) for estimate in ranks]
        if any(sizes):
            table.add_row(name, *map(size, sizes), *((f"{sizes[0]:,}",) if one else ()), Text(remark, style="dim"))
    totals = [sum(estimate.peak.values()) for estimate in ranks]
    cells = [*map(size, totals), *((f"{totals[0]:,}",) if one else ())]
    table.add_row("peak", *cells, Text("estimate, of all at once", style="dim"), style="bold")
    return table


def _peak(estimate: "Estimate") -> Table:
    table = Table.grid(padding=(0, 2))
    total = sum(estimate.peak.values())
    for index, (kind, held) in enumerate(sorted(estimate.peak.items(), key=lambda item: -item[1])):
        bar = Text("█" * max(1, round(BAR * held / total)), style=COLORS[index % len(COLORS)])
        if held * 1000 >= total:
            table.add_row(f"  {kind}", Text(size(held), justify="right"), bar)
    return table


def _traffic(flows: "Sequence[Flow]", estimate: "Estimate") -> Table:
    table = _table("axis", "collective", "calls", "of tensors", "sent by a rank", "at least", "ratio")
    least = {(bound.axis, bound.kind): bound.wire for bound in estimate.bounds}
    for flow in flows:
        bound = least.get((flow.axis, flow.kind))
        known = ("", "") if not bound else (size(bound), f"{flow.wire / bound:.2f}")
        sent = "" if flow.kind == "receive" else size(flow.wire)
        table.add_row(flow.axis, flow.kind.replace("_", "-"), f"{flow.count:,}", size(flow.payload), sent, *known)
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        numeric = column not in ("", "the first group", "collective", "reaches", "class", "placement")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    return table


def _many(count: int, noun: str, plural: str = "s") -> str:
    return f"{count:,} {noun}{'' if count == 1 else plural}"
