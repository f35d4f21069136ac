"""Cluster files: layers, faults with the key that is near, and what is refused before a script is written."""

from pathlib import Path

import pytest

from forge_core.errors import ConfigError, LayoutError
from forge_train.launch.cluster import SECTIONS, array_tasks, check_run, load_cluster, split_overrides
from forge_train.recipe.schema import Job


def test_a_file_overrides_its_base_and_the_command_line_both(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(
        '[slurm]\npartition = "gpu"\naccount = "lab"\ngpus_per_node = 8\n[environment]\nNCCL_DEBUG = "WARN"\nA = "1"\n'
    )
    (tmp_path / "mine.toml").write_text('base = "site.toml"\n[slurm]\naccount = "other"\nnodes = 4\n[environment]\nA = "2"\n')
    cluster = load_cluster(str(tmp_path / "mine.toml"), ["--slurm.nodes=2"])
    assert (cluster.slurm.partition, cluster.slurm.account, cluster.slurm.nodes) == ("gpu", "other", 2)
    assert cluster.environment == {"NCCL_DEBUG": "WARN", "A": "2"}
    assert load_cluster(None, ["--environment.OMP_NUM_THREADS=1"]).environment == {"OMP_NUM_THREADS": 1}
    assert cluster.slurm.ranks == 8


def test_all_faults_of_a_file_are_reported_with_line_and_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        '[slurm]\npartitoin = "gpu"\nnodes = "two"\nwarn_seconds = 1\n[slrum]\nnodes = 1\n[kubernetes]\nkind = "pod"\n'
    )
    with pytest.raises(ConfigError) as refusal:
        load_cluster(str(path), [])
    text = str(refusal.value)
    assert "slurm.partitoin" in text and "did you mean 'partition'" in text and "cluster.toml:2" in text
    assert "did you mean 'slurm'" in text
    assert all(key in text for key in ("slurm.nodes", "slurm.warn_seconds", "kubernetes.kind"))


def test_a_missing_file_is_named_with_one_that_is_near(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").touch()
    with pytest.raises(ConfigError, match=r"--cluster: file .*clustr\.toml does not exist; did you mean 'cluster\.toml'"):
        load_cluster(str(tmp_path / "clustr.toml"), [])
    with pytest.raises(ConfigError, match="'site' is not a TOML file"):
        load_cluster("site", [])


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ('--slurm.time="4 hours"', "is not a time limit"),
        ('--slurm.time="1:2:3:4"', "is not a time limit"),
        ('--slurm.array="0-"', "is not a list of task numbers"),
        ("--slurm.gpu_type=h100", "gpu_type has no effect"),
        ('--slurm.options={signal = "USR1@5"}', r"options\.signal is determined by slurm\.warn_seconds"),
        ('--slurm.options={no-requeue = ""}', r"options\.no-requeue is determined by slurm\.max_requeues"),
        ("--slurm.options={gpus-per-task = 1}", "each rank must see all GPUs"),
        ('--slurm.options={partition = "x"}', r"use the key slurm\.partition"),
        ('--slurm.options={--mail-type = "x"}', "without dashes"),
        ('--slurm.setup=["a\\nb"]', "one line per item"),
        ("--container.runtime=pyxis", "needs an image"),
        ("--container.runtime=docker", "runtime"),
        ("--environment.a-b=1", "not a name of an environment variable"),
        ("--kubernetes.mount=data", "absolute path"),
    ],
)
def test_what_slurm_would_misread_is_refused(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_cluster(None, [key])


@pytest.mark.parametrize("time", ["30", "30:00", "4:00:00", "2-12", "2-12:00", "2-12:00:00"])
def test_all_forms_of_a_time_limit_are_accepted(time: str) -> None:
    assert load_cluster(None, [f'--slurm.time="{time}"']).slurm.time == time


def test_the_number_of_ranks_is_not_guessed() -> None:
    with pytest.raises(LayoutError, match=r"set slurm\.gpus_per_node"):
        load_cluster(None, []).slurm.ranks  # noqa: B018
    with pytest.raises(LayoutError, match=r"slurm\.ranks_per_node = 4 is larger than slurm\.gpus_per_node = 2"):
        load_cluster(None, ["--slurm.gpus_per_node=2", "--slurm.ranks_per_node=4"]).slurm.ranks  # noqa: B018
    assert load_cluster(None, ["--kubernetes.gpus_per_node=2"]).kubernetes.ranks == 2


def test_sections_of_cluster_files_are_not_sections_of_recipes() -> None:
    assert not set(SECTIONS) & set(Job.__dataclass_fields__)
    own, recipe = split_overrides(["--slurm.nodes=2", "--job.name=a", "--environment.A=1", "--parallel.tp=2"])
    assert own == ["--slurm.nodes=2", "--environment.A=1"] and recipe == ["--job.name=a", "--parallel.tp=2"]


@pytest.mark.parametrize(
    ("array", "tasks"), [(None, []), ("3", [3]), ("0-2", [0, 1, 2]), ("1,4-8:2,9%2", [1, 4, 6, 8, 9]), ("0-3%1", [0, 1, 2, 3])]
)
def test_tasks_of_an_array(array: str | None, tasks: list[int]) -> None:
    assert array_tasks(array) == tasks


def test_an_array_without_tasks_and_one_with_too_many_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no task"):
        array_tasks("5-2")
    with pytest.raises(ConfigError, match="more than 1000 tasks"):
        array_tasks("0-999999999,1")
    assert len(array_tasks("1-1000")) == 1000


def test_tasks_of_an_array_must_be_different_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"several tasks would train in .*runs/debug; add --job\.name=NAME-\{task\}"):
        check_run("debug", [], 1, "0-1", tmp_path)
    with pytest.raises(ConfigError, match="needs a job array"):
        check_run("debug", ["--job.name=a-{task}"], 1, None, tmp_path)
    (tmp_path / "r.toml").write_text('base = "debug"\n[job]\nname = "a-{task}"\n')
    with pytest.raises(ConfigError, match="replaced only on the command line"):
        check_run(str(tmp_path / "r.toml"), [], 1, "0", tmp_path)
    run = check_run("debug", ["--job.name=a-{task}"], 1, "4,6", tmp_path)
    assert run.directories == (tmp_path / "runs/a-4", tmp_path / "runs/a-6") and run.directory == "runs/a-{task}"
    placed = check_run("debug", ["--job.dir=x/{task}/y"], 1, "4", tmp_path)
    assert placed.directories == (tmp_path / "x/4/y",) and placed.directory == "x/{task}/y"


@pytest.mark.parametrize(
    "override",
    [
        r'--slurm.partition="x\ntouch BROKEN"',
        r'--slurm.qos="a\u001bb"',
        r'--slurm.setup=["module load a\nb"]',
        r'--slurm.options={reservation = "a\nb"}',
        r'--kubernetes.node_selector={a = "b\nc"}',
        r'--container.mounts=["/a\r/b"]',
    ],
)
def test_a_line_break_in_any_text_is_refused(override: str) -> None:
    """Otherwise it would end a directive of sbatch, and the rest would run as a command of the script."""
    with pytest.raises(ConfigError, match="line break or another control character"):
        load_cluster(None, [override])


@pytest.mark.parametrize("override", ["WANDB_API_KEY=abc", "HF_TOKEN=abc", "PROXY=http://me:word@proxy.example.org"])
def test_secrets_are_not_written_to_scripts_and_manifests(override: str) -> None:
    name, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=rf"environment\.{name} may be a secret") as refusal:
        load_cluster(None, [f'--environment.{name}="{value}"'])
    assert value not in str(refusal.value)


def test_secrets_of_the_recipe_are_not_written_to_scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="may be a secret") as refusal:
        check_run("debug", ['--checkpoint.store={name="remote", url="s3://bucket", secret_key="abc123"}'], 1)
    assert "abc123" not in str(refusal.value)
    with pytest.raises(ConfigError, match=r"trackers\.0\.api_key: may be a secret"):
        check_run("debug", ["--trackers.0.api_key=abc123"], 1)
    assert check_run("debug", ["--train.max_steps=300", "--data.tokenizer.name=bytes"], 1).world == 1
