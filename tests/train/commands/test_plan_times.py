"""`forge-train plan --hardware` and `--search`: what is shown, what is refused, and that offered layouts run."""

import json
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import ConfigError, ForgeError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_parallel.dryrun.fake_world import ACCELERATORS
from forge_parallel.parts import PARTS
from forge_parallel.timing import Efficiency, Hardware
from forge_parallel.timing.step_time import FREE
from forge_train.plan import dry_run, run_size
from forge_train.prediction import MODELED, ModeledRecipe, as_toml, calibrated, constants_of, execution_of
from forge_train.recipe.load import load_recipe
from forge_train.search import _Sizes, search
from train.commands.test_cli import forge
from train.runs import TINY

REGISTRY = Registry()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path


def test_a_modeled_step(here: Path) -> None:
    done = forge(here, "plan", "tiny.toml", "--world", "4", "--hardware", "h100", "--page", "plan/plan.html", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    found = plan["modeled"]
    assert plan["device"]["name"] == found["hardware"] == "h100"
    assert found["step_s"] == pytest.approx(sum(found["parts_s"].values()))
    tokens = plan["step"]["micro_batches"] * plan["step"]["rows"] * plan["step"]["length"]
    assert found["tokens_per_second_per_gpu"] == pytest.approx(tokens / found["step_s"])
    size = run_size(load_recipe(str(here / "tiny.toml"), (), 4, REGISTRY, here=None).job)
    flops = size.flops / size.tokens
    assert found["mfu"] == pytest.approx(flops * found["tokens_per_second_per_gpu"] / 67e12)  # the recipe computes in fp32
    assert found["error"] == {"runs": 21, "median": 0.051, "largest": 0.406}
    state = plan["ranks"][0]["parameters"] + plan["ranks"][0]["optimizer"]
    assert found["saves"]["stall"] == pytest.approx(state / 40e9)
    page = (here / "plan" / "plan.html").read_text()
    for words in ("Where the time goes", "<svg", "modeled, not measured", "Saves"):
        assert words in page


def test_what_a_person_reads(here: Path) -> None:
    done = forge(here, "plan", "tiny.toml", "--world", "4", "--hardware", "h100", "--stall", "30")
    assert done.returncode == 0, done.stderr
    for words in ("4 ranks, 1 node of 8", "A modeled step on h100", "MFU", "host", "modeled, not measured", "median error 5.1%"):
        assert words in done.stdout
    assert "training stops for about 30 s" in done.stdout


def test_unknown_hardware_has_bytes_but_no_time(here: Path) -> None:
    done = forge(here, "plan", "tiny.toml", "--world", "4", "--hardware", "rtx", "--json")
    assert done.returncode == 0, done.stderr
    assert "no modeled time: unknown hardware 'rtx': choose a100" in done.stderr
    plan = json.loads(done.stdout)
    assert plan["modeled"] is None
    assert plan["ranks"][0]["peak"]["bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--search"], "add --hardware with the name of the GPU, or remove --search"),
        (["--search", "--hardware", "rtx"], "--search compares modeled times, and these need known hardware"),
        (["--memory", "3"], "add --search, or remove --memory"),
        (["--calibrate", "runs/x", "--stall", "3"], "or remove --calibrate, --stall"),
        (["--hardware", "h100", "--search", "--rank", "0", "--page", "x"], "that you choose: --rank, --page"),
        (["--hardware", "h100", "--search", "--gpu-hours", "3"], "that you choose: --gpu-hours"),
        (["--hardware", "h100", "--device", "h200"], "--hardware names the device and models times; remove --device"),
        (["--hardware", "h100", "--imbalance", "inf"], "--imbalance is finite"),
        (["--hardware", "h100", "--search", "--memory", "inf"], "positive and finite"),
        (["--hardware", "h100", "--search", "--memory", "nan"], "positive and finite"),
        (["--hardware", "gpu.toml"], "cannot read the hardware file gpu.toml"),
        (["--hardware", "h100", "--constants", "none.toml"], "cannot read constants from none.toml"),
        (["--hardware", "h100", "--calibrate", "tiny.toml"], "give a run directory, calibration.json or doctor.json"),
        (["--hardware", "h100", "--search", "--memory", "-1"], "the memory of a rank is positive"),
        (
            ["--hardware", "h100", "--search", "--memory", "1e-6"],
            "no layout of 4 GPUs fits into 0.0 GiB for each rank: the smallest",
        ),
        (["--hardware", "h100", "--stall", "0"], "stall = 0.0: must be positive"),
    ],
)
def test_wrong_requests(here: Path, arguments: list[str], told: str) -> None:
    done = forge(here, "plan", "tiny.toml", "--world", "4", *arguments)
    assert done.returncode not in (0, 1), done.stdout
    assert told in " ".join(done.stderr.split())


def test_a_model_without_declared_products_has_no_time(here: Path) -> None:
    done = forge(here, "plan", "debug-joint", "--world", "2", "--hardware", "h100", "--json")
    assert done.returncode == 0, done.stderr
    assert "no modeled time: the work of the model" in done.stderr
    assert json.loads(done.stdout)["modeled"] is None


REFUSED = {
    "shard": {"offload"},
    "tensor": set(),
    "context": set(),
    "expert": set(),
    "recompute": {"keep"},
    "compile": {"budget"},
    "float8": {"include", "exclude", "emulate"},
}
"""Transforms -> keys whose effect on time is not modeled."""


def test_every_transform_is_modeled_or_refused() -> None:
    """A new transform, or a new key of one, has to be placed here: nothing is ignored."""
    found = {name: REGISTRY.load("forge.transforms", name) for name in PARTS["forge.transforms"]}
    assert found.keys() == MODELED.keys() == REFUSED.keys()
    for name, transform in found.items():
        assert {item.name for item in fields(transform)} == MODELED[name] | REFUSED[name], name


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (['--transforms.recompute.keep=["matmul"]'], r"transforms.recompute.keep = \['matmul'\] has no modeled time"),
        (
            ["--transforms.recompute=none", "--transforms.compile.budget=0.5"],
            "compile.budget = 0.5 has no modeled time",
        ),
        (["--transforms.shard.offload=true"], "transforms.shard.offload = True has no modeled time"),
        (["--model.moe.experts=8", "--model.moe.capacity=1.25"], "model.moe.capacity drops tokens"),
        (["--model.attention.value_embeddings.layers=[1]"], "model.attention.value_embeddings adds tables"),
        (
            ["--model.attention.name=compressed_mqa", "--model.kv_heads=32", "--model.attention.top_k=8"],
            "model.attention compresses keys",
        ),
        (["--model.layer_inputs.dim=16"], "model.layer_inputs adds a table and a projection"),
        (["--model.streams.count=2"], "model.streams mixes several residual streams"),
    ],
)
def test_settings_without_a_modeled_time(keys: list[str], told: str) -> None:
    job = load_recipe("7b", keys, None, REGISTRY, here=None).job
    with pytest.raises(ForgeError, match=told):
        execution_of(job, Layout())
    with pytest.raises(ForgeError, match=told):
        ModeledRecipe(job).work  # noqa: B018


def test_float8_weights_are_gathered_in_float8_with_one_scale_per_tensor_only() -> None:
    keys = (
        ["--transforms.float8.recipe=rowwise"],
        ["--transforms.float8.all_gather=false"],
        ["--transforms.float8.recipe=tensorwise"],
    )
    jobs = [load_recipe("8b-h200-fp8", one, None, REGISTRY, here=None).job for one in keys]
    assert [execution_of(job, Layout()).float8_gather for job in jobs] == [False, False, True]


def test_latent_attention_has_no_modeled_context_parallelism() -> None:
    keys = ["--model.kv_heads=none", "--model.attention.name=mla", "--train.micro_batch=1", "--parallel.cp=2"]
    recipe = load_recipe("7b", keys, 64, REGISTRY, here=None)
    assert recipe.layout is not None
    with pytest.raises(ForgeError, match="keys and values head by head"):
        ModeledRecipe(recipe.job).predict(recipe.job, recipe.layout, Hardware.load("h100"), Efficiency())
    found = search("7b", keys[:2], 64, REGISTRY, Hardware.load("h100"), Efficiency(), wanted=2, count=False)
    assert all(one.layout.cp == 1 for one in found.best)


def test_frozen_parameters_have_no_time() -> None:
    recipe = load_recipe("debug", ['--parameters.groups=[{match = "embed*", frozen = true}]'], 1, REGISTRY, here=None)
    with pytest.raises(ForgeError, match="frozen"):
        ModeledRecipe(recipe.job).work  # noqa: B018


@pytest.mark.parametrize("recipe", ["7b", pytest.param("30b-a3b-8xh100", marks=pytest.mark.slow)])
def test_offered_layouts_pass_check(recipe: str, tmp_path: Path) -> None:
    """Offered layouts are legal in the recipe with their lines, each is of another kind, and the fastest comes first."""
    world, found = 64, search(recipe, (), 64, REGISTRY, Hardware.load("h200"), Efficiency(), wanted=3, count=False)
    assert len({one.kind for one in found.best}) == 3
    assert [one.time.seconds for one in found.best] == sorted(one.time.seconds for one in found.best)
    for one in found.best:
        resolved = load_recipe(recipe, one.overrides(), world, REGISTRY, here=None)
        assert resolved.layout == one.layout
        assert one.memory <= found.memory
        lines = tomllib.loads(one.fragment())
        (tmp_path / "mine.toml").write_text(f'base = "{recipe}"\n{one.fragment()}\n')
        assert lines["train"]["micro_batch"] == resolved.job.train.micro_batch
        assert lines["parallel"]["dp_shard"] == resolved.layout.dp_shard
        again = ModeledRecipe(resolved.job).predict(resolved.job, one.layout, Hardware.load("h200"), Efficiency())
        assert again.seconds == pytest.approx(one.time.seconds)
    if recipe.startswith("30b"):
        tried = {one.kind[3] for one in [*found.best, *found.slower, *(one.candidate for one in found.rejected)]}
        assert 1 in tried, "experts without expert parallelism are compared, too"


def test_less_memory_adds_no_layout() -> None:
    """The best step gets no faster as memory shrinks, until nothing fits."""
    best = []
    for gib in (120, 24):
        found = search("7b", (), 16, REGISTRY, Hardware.load("h200"), Efficiency(), memory=gib << 30, wanted=1, count=False)
        best.append(found.best[0].time.seconds)
        assert found.best[0].memory <= gib << 30
    assert best == sorted(best)
    with pytest.raises(ForgeError, match=r"no layout of 4 GPUs fits into 1\.0 GiB"):
        search("7b", (), 4, REGISTRY, Hardware.load("h200"), Efficiency(), memory=1 << 30)


def test_the_best_layout_fits_as_a_dry_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that needs a byte more than there is seems to fit, because estimates are too small: a dry run shows that it does
    not, and another one is offered."""
    h200 = Hardware.load("h200")
    first = search("debug", (), 8, REGISTRY, h200, Efficiency(), wanted=1).best[0]
    recipe = load_recipe("debug", first.overrides(), 8, REGISTRY, here=None)
    (plan,) = dry_run(recipe.job, first.layout, REGISTRY, 8, (0,), ACCELERATORS["h200"]).ranks
    assert first.counted and first.memory == sum(plan.peak.values())
    original = _Sizes.memory
    monkeypatch.setattr(_Sizes, "memory", lambda sizes, candidate: int(0.9 * original(sizes, candidate)))
    bound = first.memory - 1
    estimated = search("debug", (), 8, REGISTRY, h200, Efficiency(), memory=bound, wanted=1, count=False).best[0]
    assert (str(estimated), estimated.counted) == (str(first), False)
    found = search("debug", (), 8, REGISTRY, h200, Efficiency(), memory=bound, wanted=2)
    assert [one.counted for one in found.best] == [True, False]
    assert found.best[0].memory <= bound and found.best[0].time.seconds >= first.time.seconds


def test_what_a_dry_run_refuses_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Layout] = []

    def refuse_first(job: Any, layout: Layout, *others: Any) -> Any:
        tried.append(layout)
        if len(tried) == 1:
            raise ForgeError("blocks cannot be built")
        return dry_run(job, layout, *others)

    monkeypatch.setattr("forge_train.search.dry_run", refuse_first)
    found = search("debug", (), 8, REGISTRY, Hardware.load("h200"), Efficiency(), wanted=1)
    assert found.refused == {"blocks cannot be built": 1}
    assert found.rejected[0].candidate.layout == tried[0] and found.best[0].counted


def test_what_check_refuses_is_not_offered() -> None:
    """Ranks that exchange heads for positions need equally many heads: other layouts are listed as refused, and not offered."""
    keys = ["--transforms.context.kind=ulysses", "--data.sequence_length=8192", "--model.max_length=8192"]
    found = search("debug", keys, 8, REGISTRY, Hardware.load("h100"), Efficiency(), wanted=50)
    for one in found.best:
        load_recipe("debug", [*keys, *one.overrides()], 8, REGISTRY, here=None)
    refused = [one for one in found.rejected if one.reason.startswith("refused")]
    assert refused and all("'ulysses'" in reason for reason in found.refused)
    for one in refused:
        with pytest.raises(ConfigError):
            load_recipe("debug", [*keys, *one.candidate.overrides()], 8, REGISTRY, here=None)


def test_an_execution_has_the_keys_of_the_recipe() -> None:
    keys = ["--transforms.recompute.every=2", "--transforms.shard.reduce=each", "--transforms.compile.mode=default"]
    recipe = load_recipe("7b", keys, 64, REGISTRY, here=None)
    assert recipe.layout is not None
    found = execution_of(recipe.job, recipe.layout)
    assert (found.rows, found.length, found.micro_batches) == (1, 8192, 8)
    assert (found.recompute, found.every, found.reduce, found.reshard, found.compiled) == ("full", 2, "each", False, True)


def test_constants_survive_a_file(tmp_path: Path) -> None:
    place = tmp_path / "constants.toml"
    place.write_text(as_toml(replace(Efficiency(), matmul=0.5, dated="mine")))
    found = constants_of(place)
    assert (found.matmul, found.dated, found.error) == (0.5, "mine", None)
    assert all(getattr(found, name) == pytest.approx(getattr(Efficiency(), name)) for name in FREE if name != "matmul")
    for line, told in (
        ("matmul = 0", "is not a positive number"),
        ("speed = 1", "unknown constants speed"),
        ("matmul =", "cannot read"),
    ):
        place.write_text(line)
        with pytest.raises(ForgeError, match=told):
            constants_of(place)


def test_calibrated_with_a_run(here: Path) -> None:
    """A run that was half as fast as modeled: afterwards the model is close to it."""
    hardware = Hardware.load("h100")
    recipe = load_recipe("7b", ["--transforms.recompute=none"], 8, REGISTRY, here=None)
    assert recipe.layout is not None
    speed = 8 * ModeledRecipe(recipe.job).predict(recipe.job, recipe.layout, hardware, Efficiency()).tokens_per_second / 2
    run = here / "run"
    (run / "logs").mkdir(parents=True)
    (run / "config.toml").write_text(recipe.as_toml())
    (run / "logs" / "rank-0.log").write_text("2026-01-01T00:00:00.000Z rank 0/8 INFO forge_train: step 1\n")
    slow = [{"step": 1, "tokens_per_second": 1.0}]  # the first steps compile
    lines = slow + [{"step": step, "tokens_per_second": speed} for step in range(2, 9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fitted, (observed,) = calibrated([run], hardware, Efficiency(), REGISTRY)
    assert observed.measured == pytest.approx(speed / 8)
    assert abs(observed.error(fitted)) < 0.3 < abs(observed.error(Efficiency()))
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ForgeError, match="has 0 lines with tokens_per_second"):
        calibrated([run], hardware, Efficiency(), REGISTRY)


def test_a_calibration_runs_no_code_of_a_run(here: Path) -> None:
    """A run's directory names a Python file: it does not run without the user's trust."""
    (here / "evil.py").write_text("raise SystemExit('it ran')")
    recipe = load_recipe("debug", (), None, REGISTRY, here=None)
    run = here / "run"
    (run / "logs").mkdir(parents=True)
    text = recipe.as_toml().replace('name = "adamw"', f'name = "{here}/evil.py:Muon"')
    assert "evil.py" in text
    (run / "config.toml").write_text(text)
    (run / "logs" / "rank-0.log").write_text("2026-01-01T00:00:00.000Z rank 0/1 INFO forge_train: step 1\n")
    with pytest.raises(ForgeError, match="--trust-code"):
        calibrated([run], Hardware.load("h100"), Efficiency(), Registry())
    row = {"entry": "1", "recipe": tomllib.loads(text), "world": 1, "device": "device", "tokens_per_second_per_rank": 1.0}
    (here / "calibration.json").write_text(json.dumps({"rows": [row]}))
    with pytest.raises(ForgeError, match="--trust-code"):
        calibrated([here / "calibration.json"], Hardware.load("h100"), Efficiency(), Registry())


def test_calibrated_with_a_campaign(here: Path) -> None:
    """Rows of `calibration.json` as the campaigns' page describes them; without `[job]`, as a campaign writes them."""
    hardware = Hardware.load("h100")
    recipe = load_recipe("7b", ["--transforms.recompute=none"], 8, REGISTRY, here=None)
    assert recipe.layout is not None
    speed = ModeledRecipe(recipe.job).predict(recipe.job, recipe.layout, hardware, Efficiency()).tokens_per_second
    tables = {name: table for name, table in recipe.as_json().items() if name != "job"}
    row = {"entry": "dp8", "recipe": tables, "world": 8, "device": "device", "tokens_per_second_per_rank": speed}
    place = here / "calibration.json"
    place.write_text(json.dumps({"format": 1, "campaign": "mine", "rows": [row]}))
    fitted, (observed,) = calibrated([place], hardware, Efficiency(), REGISTRY)
    assert observed.name == f"dp8 of {place}"
    assert observed.error(Efficiency()) == pytest.approx(0.0)
    assert all(getattr(fitted, name) == getattr(Efficiency(), name) for name in FREE), "the constants fit already"
    for wrong, told in (
        ({"device": "host"}, "ran on a CPU"),
        ({"world": None}, "not a row of a campaign"),
        ({"recipe": 3}, "no recipe"),
    ):
        place.write_text(json.dumps({"rows": [row | wrong]}))
        with pytest.raises(ForgeError, match=told):
            calibrated([place], hardware, Efficiency(), REGISTRY)


def test_calibrated_with_a_doctor(here: Path) -> None:
    """Rates of a device become parts of the peaks of the hardware."""
    checks = [
        ("matmul", "bf16", 794.5),
        ("bandwidth", "device memory", 2680.0),
        ("collectives", "all-reduce of 65536 KiB, bus", 360.0),
    ]
    steps = [{"name": step, "checks": [{"name": name, "measured": rate}]} for step, name, rate in checks]
    (here / "doctor.json").write_text(json.dumps({"steps": steps}))
    fitted, runs = calibrated([here / "doctor.json"], Hardware.load("h100"), Efficiency(), REGISTRY)
    assert not runs
    assert (fitted.matmul, fitted.memory, fitted.node) == pytest.approx((0.715, 0.8, 0.8), abs=1e-3)
    assert fitted.error is None
    (here / "doctor.json").write_text(json.dumps({"steps": []}))
    with pytest.raises(ForgeError, match="has no rates of a GPU"):
        calibrated([here / "doctor.json"], Hardware.load("h100"), Efficiency(), REGISTRY)


def test_numbers_of_the_help(here: Path) -> None:
    done = forge(here, "plan", "--help")
    for option in (
        "--hardware",
        "--search",
        "--memory",
        "--imbalance",
        "--calibrate",
        "--constants",
        "--page",
        "--gpu-hours",
        "--stall",
    ):
        assert re.search(rf"{option}\b", done.stdout), option
