"""The script of a SLURM job: starts the ranks with srun, passes the warning on, and requeues the job after the right exit codes.

SLURM warns only the shell of the script before the time limit (`--signal=B:...`), and bash runs a trap only once the command that
it waits for has ended: srun runs in the background. srun forwards SIGUSR1 and SIGUSR2 to all ranks, but kills them on SIGTERM.
After a preemption (`PreemptMode=REQUEUE`) and after `scancel`, SLURM itself sends SIGTERM to all ranks, and the job is already
completing. A preemption with a grace time sends SIGTERM to the ranks while the job is still running.
"""

import re
import shlex
from pathlib import Path

from forge_core.errors import ConfigError, Fault
from forge_train.launch.cluster import TASK, CheckedRun, Cluster, trainer_command
from forge_train.process.stop import FAULTY, FOLLOWS, FULL, REQUEUE

AGAIN = (REQUEUE, FOLLOWS, FAULTY, FULL)
"""Exit codes after which the job is requeued, in addition to those of ranks that a signal ended (above 128)."""

COMMENT = "forge-train run in "
"""Begins the comment of a job; the directory of the run follows. `--submit` finds the jobs of a directory by it."""

_TASK_NUMBER = "$SLURM_ARRAY_TASK_ID"

_WAIT_SECONDS = 600
"""Seconds that srun waits for the other ranks after the first one has ended; then it kills them. A rank may still be saving."""

_FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FORGE_LOCAL_DEVICE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)
"""Variables of another launcher. sbatch copies the environment of the shell that submits, and the ranks would believe them."""

_BODY = """
# Variables of another launcher would contradict srun. Ranks find each other by SLURM's own: the first node of the step, and a
# port that belongs to job, step and restart.
unset {foreign}
{exports}
cd {folder} || exit 2
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
logs={directory}/slurm/$job
mkdir -p "$logs" || exit 2

# The warning before the time limit reaches only this shell, which passes it on: the run finishes its step, saves, and ends with
# {requeue_code}. (SIGTERM would make srun kill the ranks. SLURM sends it to the ranks itself.)
step=
asked=
trap 'asked=yes; [ -z "$step" ] || kill -{signal} "$step" 2>/dev/null' {traps}
{setup}
echo "$(date +%FT%T) job $job, start $((${{SLURM_RESTART_COUNT:-0}} + 1)): {what}; logs in $logs"
{srun} &
step=$!
[ -z "$asked" ] || kill -{signal} "$step"
while :; do # a signal ends `wait` before the ranks have ended
  asked=
  wait "$step"
  code=$?
  [ -n "$asked" ] || break
done

# Codes: {requeue_code} stopped in time; {lost} a rank or a machine was lost, or memory ran out; above 128 a signal ended a rank.
# After all other codes (0 finished, 2 refused, 93 no progress ...) another start would end the same way.
case "$code" in
  {again}) again=yes ;;
  *) [ "$code" -gt 128 ] && again=yes || again=no ;;
esac
told="$(date +%FT%T) job $job ended with code $code"
if [ "$again" = yes ]; then
  # On a node that SLURM has lost, this shell goes on, while the job may have started again elsewhere.
  starts=$(timeout 60 squeue --noheader --jobs="$job" --Format=RestartCnt:12 | tr -cd 0-9)
  [ "${{starts:-${{SLURM_RESTART_COUNT:-0}}}}" = "${{SLURM_RESTART_COUNT:-0}}" ] && state= || state=COMPLETING
  case "${{state:-$(timeout 60 squeue --noheader --jobs="$job" --format=%T)}}" in
    CANCEL* | COMPLETING*) # by scancel: it stays canceled. By a preemption: SLURM has already requeued it.
      echo "$told; SLURM has canceled or requeued this job itself" ;;
    *)
      if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {limit} ]; then
        echo "$told; not requeued again after {limit} requeues (slurm.max_requeues). Submit it again to continue" >&2
      elif scontrol requeue "$job"; then
        echo "$told; requeued"
      else
        echo "$told; it cannot be requeued (see above). Submit it again to continue" >&2
      fi ;;
  esac
else
  echo "$told; not requeued"
fi
exit "$code"
"""


def slurm_script(run: CheckedRun, cluster: Cluster) -> str:
    """Returns a script for sbatch.

    Args:
        run: the checked recipe.
        cluster: the cluster file.

    Raises:
        ConfigError: the container would not see a path that the run writes or reads.
    """
    slurm = cluster.slurm
    directory = _in_shell(run.directory)
    srun = [*_srun(run, cluster), *(_in_shell(word) for word in ["run", run.recipe, *run.overrides])]
    exports = "\n".join(f"export {name}={shlex.quote(str(value))}" for name, value in cluster.environment.items())
    body = _BODY.format(
        foreign=" \\\n  ".join(map(" ".join, (_FOREIGN[:7], _FOREIGN[7:]))),
        exports=exports,
        folder=shlex.quote(str(run.folder)),
        directory=directory,
        signal=run.signal,
        traps=f"TERM {run.signal}",
        setup="\n".join(slurm.setup),
        what=f"{slurm.nodes} x {slurm.ranks} ranks",
        srun=" \\\n  ".join(srun),
        requeue_code=REQUEUE,
        lost=", ".join(map(str, AGAIN[1:])),
        again=" | ".join(map(str, AGAIN)),
        limit=slurm.max_requeues,
    )
    head = [
        "#!/bin/bash",
        f"# Written by `forge-train launch slurm`: the run {run.name!r} on {slurm.nodes} x {slurm.ranks} ranks.",
        *_directives(run, cluster),
    ]
    return "\n".join(head) + "\n" + re.sub(r"\n{3,}", "\n\n", body)


def _directives(run: CheckedRun, cluster: Cluster) -> list[str]:
    slurm = cluster.slurm
    gpus = f"{slurm.gpu_type}:{slurm.gpus_per_node}" if slurm.gpu_type else slurm.gpus_per_node
    number = "%A_%a" if slurm.array else "%j"
    options: dict[str, str | int | None] = {
        "job-name": run.name,
        "comment": COMMENT + str(run.folder / run.directory),
        "nodes": slurm.nodes,
        "ntasks-per-node": slurm.ranks,
        "gpus-per-node": gpus,
        "cpus-per-task": slurm.cpus_per_rank,
        "mem": slurm.memory,
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "array": slurm.array,
        "output": f"{run.folder}/{_plain(run.name)}-{number}.out",
        "open-mode": "append",
        "signal": f"B:{run.signal}@{slurm.warn_seconds}",
        "requeue": "",
        **slurm.options,
    }
    return [_directive(name, value) for name, value in options.items() if value is not None]


def _directive(name: str, value: str | int) -> str:
    text = str(value)
    if text and not re.fullmatch(r"[\w@%+=:,./{}\[\]-]+", text, re.ASCII):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'  # sbatch splits directives at spaces, and reads quotes
    return f"#SBATCH --{name}" + (f"={text}" if text else "")


def _plain(name: str) -> str:
    """Returns a name for the output file: sbatch expands `%`, and `{task}` is in the number of the array task."""
    return re.sub(r"[^\w.-]+", "-", name.replace(TASK, "")).strip("-") or "run"


def _srun(run: CheckedRun, cluster: Cluster) -> list[str]:
    """Returns srun's part of the command, one quoted word or group of words per line of the script."""
    slurm, container = cluster.slurm, cluster.container
    # A rank that still saves must not be killed when others have ended, whatever the cluster's default is.
    words = ["srun", "--kill-on-bad-exit=0", f"--wait={_WAIT_SECONDS}", '--output="$logs/rank-%5t.log"', "--open-mode=append"]
    if slurm.cpus_per_rank is not None:
        words.append(f"--cpus-per-task={slurm.cpus_per_rank}")  # newer versions of srun do not take it from the job
    if container.runtime is not None:
        mounts = [f"{run.folder}:{run.folder}", *(item if ":" in item else f"{item}:{item}" for item in container.mounts)]
        _require_mounted(run, mounts)
        if container.runtime == "pyxis":
            words += [shlex.quote(f"--container-image={container.image}"), shlex.quote(f"--container-mounts={','.join(mounts)}")]
            words.append(shlex.quote(f"--container-workdir={run.folder}"))
        else:
            gpus = "--nv " if slurm.gpus_per_node is not None else ""
            binds = " ".join(shlex.quote(f"--bind={mount}") for mount in mounts)
            words.append(f"apptainer exec {gpus}{binds} {shlex.quote(f'--pwd={run.folder}')} {shlex.quote(str(container.image))}")
    return [*words, shlex.join(trainer_command(container))]


def _require_mounted(run: CheckedRun, mounts: list[str]) -> None:
    """Checks that the container sees the run's directory and the recipe under the same paths."""
    seen = [Path(target) for host, target, *_ in (mount.split(":") for mount in mounts) if host == target]
    paths = {"the run's directory": run.directories[0]} | ({"the recipe": Path(run.recipe)} if "/" in run.recipe else {})
    for what, path in paths.items():
        if not any(path.is_relative_to(target) for target in seen):
            raise ConfigError(
                [
                    Fault(
                        "container.mounts",
                        f"the container does not see {what}, {path}",
                        hint=f"add {str(path.parent)!r} to the mounts",
                    )
                ]
            )


def _in_shell(word: str) -> str:
    """Quotes a word; `{task}` becomes the number of the array task."""
    parts = [shlex.quote(part) if part else "" for part in word.split(TASK)]
    return f'"{_TASK_NUMBER}"'.join(parts) or "''"
