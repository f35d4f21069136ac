"""`forge-train plan`: what a user reads, and what a program reads, of a dry run."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_train.commands.plan import draw, listed
from forge_train.plan import dry_run, groups_of, placed_parameters
from forge_train.recipe.load import load_recipe
from train.commands.test_cli import ENVIRONMENT, forge
from train.runs import TINY


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path


def test_the_plan_of_a_recipe(here: Path) -> None:
    done = forge(here, "plan", "tiny.toml", "--world", "4", "--parallel.dp_replicate=2", "--per-node", "2", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["layout"]["dp_replicate"] == plan["layout"]["dp_shard"] == 2
    assert plan["step"] == {"micro_batches": 1, "rows": 2, "length": 16}
    assert [(axis["axis"], axis["first"], axis["nodes"]) for axis in plan["axes"]] == [
        ("dp_replicate", [0, 2], 2),
        ("dp_shard", [0, 1], 1),
    ]
    (rank,) = plan["ranks"]
    # Every dimension but the vocabulary divides: 61 rows are 31 on each of two ranks, padded.
    blocks = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16)
    parameters = 4 * ((blocks + 16) // 2 + 2 * 31 * 16)
    assert rank["parameters"] == rank["gradients"] == parameters
    assert rank["optimizer"] == 2 * parameters + 4 * 21  # two moments, and a count for each of 21 tensors
    assert rank["peak"]["bytes"] == sum(rank["peak"]["of"].values()) > 4 * parameters
    assert {bound["axis"] for bound in rank["bounds"]} == {"dp_replicate", "dp_shard"}
    assert not list(here.glob("runs")), "nothing is written"


def test_what_a_person_reads(here: Path) -> None:
    done = forge(here, "plan", "tiny.toml", "--world", "4", "--per-node", "2")
    assert done.returncode == 0, done.stderr
    for words in ("4 ranks, 2 nodes of 2: dp4", "node 1 │ 2 s2 │ 3 s3 │", "dp_shard", "optimizer state", "reduce-scatter"):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 160


def test_a_gpu_can_be_asked_about(here: Path) -> None:
    """Windows of attention: masks and scores of T x T on a CPU, none on a GPU; weights and traffic are the same."""
    keys = ("--world", "2", "--model.attention.window=4", "--data.sequence_length=512", "--model.max_length=512", "--json")
    done = [forge(here, "plan", "tiny.toml", *keys, *device) for device in ((), ("--device", "h200"))]
    assert [one.returncode for one in done] == [0, 0], done[1].stderr
    (cpu, gpu) = (json.loads(one.stdout) for one in done)
    assert cpu["device"] == {"name": "cpu"} and gpu["device"] == {"name": "h200", "memory": 141 << 30}
    for name in ("parameters", "gradients", "optimizer", "flows"):
        assert cpu["ranks"][0][name] == gpu["ranks"][0][name]
    assert cpu["ranks"][0]["activations"] > gpu["ranks"][0]["activations"] + 512 * 512
    refused = forge(here, "plan", "tiny.toml", "--device", "tpu")
    assert refused.returncode == 2 and "h100" in refused.stderr


def test_ranks_can_be_chosen(here: Path) -> None:
    done = forge(here, "plan", "tiny.toml", "--world", "4", "--rank", "3", "--rank", "0", "--json")
    assert [rank["rank"] for rank in json.loads(done.stdout)["ranks"]] == [3, 0]
    refused = forge(here, "plan", "tiny.toml", "--world", "4", "--rank", "4")
    assert refused.returncode == 2
    assert "ranks of 4 processes are 0 to 3" in refused.stderr


def test_experts_in_a_plan() -> None:
    """The map names the places that experts borrow; what travels to them has an axis of its own and a stated assumption."""
    registry = Registry()
    keys = ["--parallel.ep=2", "--train.micro_batch=1", "--train.global_batch=4", "--model.layers=2"]
    resolved = load_recipe("debug-moe", keys, 4, registry)
    assert resolved.layout is not None
    planning = dry_run(resolved.job, resolved.layout, registry, per_node=2, ranks=[3])
    page = io.StringIO()
    draw(planning, "debug-moe", Console(file=page, width=200))
    words = ("dp4ep2", "s = dp_shard, f = efsdp, e = ep; ranks of one color exchange over ep", "node 1 f1 │ 2 s2 e0 │ 3 s3 e1 │")
    for word in (*words, "assumed to be uniform", "all-to-all"):
        assert word in page.getvalue(), word
    plan = planning.as_json()
    assert "assumed to be uniform" in plan["method"]
    (rank,) = plan["ranks"]
    places = {"pp": 0, "dp_replicate": 0, "dp_shard": 3, "cp": 0, "tp": 0, "efsdp": 1, "ep": 1, "etp": 0}
    assert rank["at"] == places
    (travel,) = (flow for flow in rank["flows"] if flow["axis"] == "ep")
    # 64 tokens, 2 of 8 experts: 50 of them have one of 4 experts on each of two ranks, 64 (1 - 4/8 3/7) = 50.3.
    rows = 2 * 50
    told = 2 * 2 * 4  # two weights and two experts in fp32
    row = 2 * (2 * 64 * 4 + told)  # with the token and its sum in fp32, and the gradients of all
    assert travel["kind"] == "all_to_all"
    assert travel["payload"] == rows * row + 2 * 2 * 8  # and counts of rows and slots


def test_what_a_run_would_refuse_is_refused(here: Path) -> None:
    done = forge(here, "plan", "tiny.toml", "--world", "3")
    assert done.returncode == 2
    assert "train.global_batch" in done.stderr


def test_it_runs_once_not_under_a_launcher(here: Path) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = forge(here, "plan", "tiny.toml", "--world", "2", **launched)
    assert done.returncode == 2
    assert "without torchrun" in done.stderr


def test_groups_and_the_nodes_that_they_span() -> None:
    found = {group.axis: group for group in groups_of(Layout.parse("pp2hsdp2x4tp4"), 8)}
    assert list(found) == ["pp", "dp_replicate", "dp_shard", "tp"]
    assert {axis: (group.size, group.groups, group.nodes) for axis, group in found.items()} == {
        "pp": (2, 32, 2),
        "dp_replicate": (2, 32, 2),
        "dp_shard": (4, 16, 2),
        "tp": (4, 16, 1),
    }
    assert found["dp_shard"].first == (0, 4, 8, 12)
    assert [group.nodes for group in groups_of(Layout.parse("tp4"), 3)] == [2]
    assert [group.axis for group in groups_of(Layout.parse("dp4ep2"), 8)] == ["dp_shard", "efsdp", "ep"]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0, 1, 2, 3), "0-3"),
        ((0, 1), "0, 1"),
        ((0, 8, 16), "0, 8, 16"),
        ((0, 8, 16, 24, 32), "0, 8 .. 32"),
        ((0, 3, 4), "0, 3, 4"),
    ],
)
def test_ranks_are_listed_briefly(ranks: tuple[int, ...], text: str) -> None:
    assert listed(ranks) == text


@pytest.mark.slow
def test_a_large_world_is_planned_in_little_memory() -> None:
    code = (
        "import resource, sys; from forge_train.cli import main\n"
        "try: main(['plan', '7b', '--world', '512', '--json'])\n"
        "except SystemExit as end: code = end.code\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert int(done.stderr.splitlines()[-1]) * 1024 < 4 * 2**30
    (rank,) = json.loads(done.stdout)["ranks"]
    tables = 128256 * 4096
    assert (
        rank["elements"] == (8_030_261_248 - 2 * tables) // 512 + 2 * 251 * 4096
    )  # 250.5 rows of each table, of which this one has 251


@pytest.mark.parametrize(("world", "overrides"), [(1, ()), (4, ("--parallel.tp=2",)), (2, ("--parallel.pp=2",))])
def test_every_parameter_is_shown_and_their_bytes_are_those_of_the_plan(
    here: Path, world: int, overrides: tuple[str, ...]
) -> None:
    """The same figures from two roads: parameters one by one, and the dry run's sum over a real step."""
    registry = Registry()
    resolved = load_recipe(str(here / "tiny.toml"), overrides, world, registry)
    assert resolved.layout is not None
    held = placed_parameters(resolved.job, resolved.layout, registry)
    ranks = dry_run(resolved.job, resolved.layout, registry, per_node=8).ranks
    sums = {rank: sum(parameter.bytes for parameter in parameters) for rank, parameters in held.items()}
    assert sums == {rank.rank: rank.parameters for rank in ranks}


def test_a_parameter_says_where_it_is_and_how_it_is_placed(here: Path) -> None:
    done = forge(here, "plan", "tiny.toml", "--world", "2", "--modules", "--json")
    found = {parameter["name"]: parameter for parameter in json.loads(done.stdout)["parameters"]["0"]}
    query = found["blocks.0.attention.q_proj.weight"]
    assert query["shape"] == [16, 16] and query["local"] == [8, 16], "rows are sharded over two ranks"
    assert query["placements"] == ["dp_shard: S(0)"] and query["dtype"] == "float32"
    assert [name.removeprefix("FSDP") for name in query["classes"]][:3] == ["Decoder", "ModuleDict", "Block"]
    person = forge(here, "plan", "tiny.toml", "--world", "2", "--modules")
    assert "blocks.0.attention.q_proj.weight" in person.stdout and "Parameters of rank 0" in person.stdout
