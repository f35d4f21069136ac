"""`forge-train launch local|slurm|kubernetes RECIPE`: starts a run on this machine, or as a job of a cluster. No torch."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from forge_core.errors import ForgeError, LayoutError
from forge_core.registry import Registry
from forge_core.terminal import Console
from forge_train.commands.options import OverridesCommand, RecipePath
from forge_train.launch.cluster import check_run, load_cluster, split_overrides
from forge_train.recipe.load import load_recipe

launch = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Start a run on this machine, or as a job of SLURM or Kubernetes.",
)

_OPEN = {"allow_extra_args": True, "ignore_unknown_options": True}
_ClusterFile = Annotated[
    str | None, typer.Option("--cluster", help="TOML file that describes the cluster; may have a base.", show_default=False)
]
_Nodes = Annotated[int | None, typer.Option("--nodes", help="Number of nodes.", show_default=False)]
_Gpus = Annotated[int | None, typer.Option("--gpus-per-node", help="GPUs, and so ranks, on each node.", show_default=False)]
_Ranks = Annotated[
    int | None, typer.Option("--ranks-per-node", help="Ranks on each node, if not one per GPU.", show_default=False)
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
_Image = Annotated[str | None, typer.Option("--image", help="Container image.", show_default=False)]


def _layer(section: str, **options: str | int | None) -> list[str]:
    """Returns options of the command line as overrides of a cluster file."""
    return [f"--{section}.{name}={json.dumps(value)}" for name, value in options.items() if value is not None]


@launch.command(cls=OverridesCommand, context_settings=_OPEN)
def slurm(
    context: typer.Context,
    recipe: RecipePath,
    cluster: _ClusterFile = None,
    nodes: _Nodes = None,
    gpus_per_node: _Gpus = None,
    ranks_per_node: _Ranks = None,
    time: Annotated[
        str | None, typer.Option("--time", help="Time limit: 30 (minutes), 4:00:00 or 2-12:00:00.", show_default=False)
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Partition.", show_default=False)] = None,
    account: Annotated[str | None, typer.Option("--account", help="Account to charge.", show_default=False)] = None,
    qos: Annotated[str | None, typer.Option("--qos", help="Quality of service.", show_default=False)] = None,
    array: Annotated[
        str | None, typer.Option("--array", help="Job array such as 0-7; keys contain {task}.", show_default=False)
    ] = None,
    container: Annotated[
        str | None, typer.Option("--container", help="Container runtime: pyxis or apptainer.", show_default=False)
    ] = None,
    image: _Image = None,
    submit: Annotated[bool, typer.Option("--submit/--dry-run", help="Submit the script with sbatch, or only print it.")] = False,
    as_json: _Json = False,
) -> None:
    """Print, or with --submit submit, a SLURM job that resumes by itself. Any key can be set: --optimizer.lr=1e-3

    The job is requeued before its time limit, after a preemption and after the loss of a rank, and resumes from its newest
    checkpoint. It is not requeued when the run finished, the recipe is refused, or the job was canceled.

    Keys of the cluster file can be set as well: --slurm.constraint=h100 --slurm.max_requeues=10 --environment.NCCL_DEBUG=INFO
    """
    from forge_train.launch.slurm import slurm_script

    own, overrides = split_overrides(context.args)
    options = {"nodes": nodes, "gpus_per_node": gpus_per_node, "ranks_per_node": ranks_per_node, "time": time}
    options |= {"partition": partition, "account": account, "qos": qos, "array": array}
    layers = [*_layer("slurm", **options), *_layer("container", runtime=container, image=image), *own]
    described = load_cluster(cluster, layers)
    run = check_run(recipe, overrides, described.slurm.nodes * described.slurm.ranks, described.slurm.array)
    console = Console(as_json=as_json)
    for warning in run.warnings:
        console.note(f"warning: {warning}")
    script, job = slurm_script(run, described), None
    if submit:
        from forge_train.launch.submission import submit_job, told

        job = submit_job(run, script)
        console.text(told(run, job))
    else:
        console.text(script.rstrip("\n"))
    if as_json:
        directories = [str(directory) for directory in run.directories]
        console.document({"job": job, "name": run.name, "ranks": run.world, "directories": directories, "script": script})


@launch.command(cls=OverridesCommand, context_settings=_OPEN)
def local(
    context: typer.Context,
    recipe: RecipePath,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Ranks; default: one per GPU, or one.", show_default=False)
    ] = None,
    restarts: Annotated[int, typer.Option("--restarts", min=0, help="How often to restart failed ranks.")] = 0,
    min_processes: Annotated[
        int | None,
        typer.Option("--min-processes", min=1, help="After failures of one device, continue with at least this many ranks."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; the earlier run is kept until the new run saves a checkpoint.")
    ] = False,
    machines: Annotated[int, typer.Option("--machines", min=1, help="Machines on which this command is started.")] = 1,
    machine: Annotated[int, typer.Option("--machine", min=0, help="Number of this machine, from 0.")] = 0,
    address: Annotated[str, typer.Option("--address", help="Host name of machine 0.", show_default=False)] = "",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Free port of machine 0.")] = 29500,
    attempt: Annotated[int, typer.Option("--attempt", min=0, help="Number of earlier starts of the job.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document about the run when it ends, and all else on standard error.")
    ] = False,
) -> None:
    """Start one rank per GPU of this machine; ranks restart together. Any key can be set: --optimizer.lr=1e-3

    The same as `forge-train run RECIPE --processes N`, with N counted. Refused recipes are refused before any rank starts. The
    ranks share the cores of the machine; signals reach all of them, and the exit code is that of the rank that failed first.

    On several machines without a scheduler that starts ranks, start this command on each: --machines 2 --machine 0 --address HOST
    and --machines 2 --machine 1 --address HOST. All of them have to be started again together.
    """
    from forge_parallel.launch.environment import read_launcher
    from forge_train.commands.run import run_as_document
    from forge_train.process.restarts import Machines, devices, supervised

    size = processes or max(1, devices())
    if machine >= machines:
        raise LayoutError(f"--machine = {machine}, but --machines = {machines}: machines have the numbers 0 to {machines - 1}")
    if machines > 1 and not address:
        raise LayoutError(f"--machines = {machines} needs --address, the host name of machine 0")
    load_recipe(recipe, context.args, size * machines, Registry(), here=True)
    job = Machines(machines, machine, address, port, attempt) if address else None

    def start(say: Callable[[str], object] | None) -> int:
        return supervised(recipe, context.args, fresh, size, restarts, min_processes, job, say)

    if as_json:
        raise typer.Exit(run_as_document(recipe, context.args, size * machines, start, read_launcher(os.environ)))
    raise typer.Exit(start(None))


@launch.command(cls=OverridesCommand, context_settings=_OPEN)
def kubernetes(
    context: typer.Context,
    recipe: RecipePath,
    cluster: _ClusterFile = None,
    nodes: _Nodes = None,
    gpus_per_node: _Gpus = None,
    ranks_per_node: _Ranks = None,
    image: _Image = None,
    volume: Annotated[
        str | None, typer.Option("--volume", help="PersistentVolumeClaim for the run's directory.", show_default=False)
    ] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="jobset (default) or pytorchjob.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write the manifest to this file.", show_default=False)] = None,
    as_json: _Json = False,
) -> None:
    """Print a manifest for kubectl: a JobSet or a PyTorchJob that resumes. Any key can be set: --optimizer.lr=1e-3

    The manifest has the resolved recipe and one pod per node. All pods restart after a failure or a preemption, and resume from
    the newest checkpoint on the volume; none restarts after a refusal. Use: ... | kubectl apply -f -

    Keys of the cluster file can be set as well: --kubernetes.namespace=lab --kubernetes.memory=200Gi
    """
    from forge_train.launch.kubernetes import as_yaml, kubernetes_manifests

    own, overrides = split_overrides(context.args)
    options = {"nodes": nodes, "gpus_per_node": gpus_per_node, "ranks_per_node": ranks_per_node}
    layers = [*_layer("kubernetes", **options, volume=volume, kind=kind), *_layer("container", image=image), *own]
    described = load_cluster(cluster, layers)
    resolved = load_recipe(recipe, overrides, described.kubernetes.nodes * described.kubernetes.ranks, Registry())
    console = Console(as_json=as_json)
    for warning in resolved.warnings:
        console.note(f"warning: {warning}")
    manifests = kubernetes_manifests(resolved, described)
    text = as_yaml(manifests)
    if output is None:
        console.text(text.rstrip("\n"))
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as cause:
            raise ForgeError(f"the manifest cannot be written to {output}: {cause.strerror}; choose another --output") from cause
        console.text(f"wrote {output}; start the run with `kubectl apply -f {output}`")
    if as_json:
        console.document({"output": None if output is None else str(output), "manifests": manifests})
