"""`[model.moe]` in recipes: one table switches, faults name their keys, `check` says what depends on the layout."""

import json

import pytest

from forge_core.errors import ConfigError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_models.checks import experts_compile, experts_fit, experts_see_other_tokens
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig, SoftmaxTopKConfig
from forge_models.shape import Losses
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_train.cli import main
from forge_train.recipe.load import load_recipe


@pytest.fixture(scope="module")
def registry():
    return Registry()


def test_one_table_switches(tmp_path, registry):
    dense = load_recipe("debug", world=1, registry=registry).job.model
    assert dense.moe is None
    recipe = tmp_path / "sparse.toml"
    recipe.write_text('base = "debug"\n[model.moe]\nexperts = 4\nrouter = { name = "sigmoid_topk", bias_rate = 0.5 }\n')
    sparse = load_recipe(recipe, world=1, registry=registry).job.model
    assert sparse.moe == MoEConfig(experts=4, router=SigmoidTopKConfig(bias_rate=0.5))
    recipe.write_text('base = "debug-moe"\n[model]\nmoe = "none"\n')
    assert load_recipe(recipe, world=1, registry=registry).job.model.moe is None
    recipe.write_text('base = "debug"\n[model.moe]\n')
    assert load_recipe(recipe, world=1, registry=registry).job.model.moe == MoEConfig(router=SoftmaxTopKConfig())


def test_the_resolved_recipe_loads_again(tmp_path, registry):
    resolved = load_recipe("debug-moe", world=1, registry=registry)
    (tmp_path / "again.toml").write_text(resolved.as_toml())
    assert load_recipe(tmp_path / "again.toml", world=1, registry=registry).job == resolved.job
    assert ("forge.routers", "sigmoid_topk") in resolved.used


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("--model.moe.top_k=9", "model.moe.top_k", "more than experts 8"),
        ("--model.moe.router.n_group=3", "model.moe.router", "n_group 3 must divide experts 8"),
        ("--model.moe.router.topk_group=2", "model.moe.router.topk_group", "at most n_group 1"),
        ("--model.moe.router.bias_schedule=cosine", "model.moe.router.bias_steps", "must be set exactly when"),
        ("--model.moe.router.nam=x", "model.moe.router.nam", "unknown key"),
        ("--model.moe.router.name=sigmoid_topc", "model.moe.router.name", "did you mean"),
        ("--model.moe.first_dense=3", "model.moe", "no layer experts"),
        ("--model.moe.losses.sequenz=1.0", "model.moe.losses.sequenz", "unknown key"),
    ],
)
def test_faults_name_their_keys(registry, override, key, message):
    with pytest.raises(ConfigError) as refusal:
        load_recipe("debug-moe", [override], 1, registry)
    assert [(fault.key, True) for fault in refusal.value.faults] == [(key, message in str(refusal.value))]


class _Job:
    def __init__(self, model, compute="bf16", transforms=()):
        self.model, self.transforms = model, dict.fromkeys(transforms)
        self.precision = type("Precision", (), {"compute": compute})()


def test_experts_must_divide_over_the_ranks_that_share_them(registry):
    model = load_recipe("debug-moe", registry=registry).job.model
    job = _Job(model)
    assert not list(experts_fit(job, Layout.of({"dp_shard": 4, "ep": 4}, 4)))
    (fault,) = experts_fit(job, Layout.of({"dp_shard": 3, "ep": 3}, 3))
    assert fault.key == "model.moe.experts" and "1, 2, 4, 8" in fault.hint
    (fault,) = experts_fit(job, Layout.of({"tp": 3, "etp": 3}, 3))
    assert fault.key == "model.moe.ffn_dim"
    (fault,) = experts_fit(_Job(load_recipe("debug", registry=registry).job.model), Layout.of({"dp_shard": 2, "ep": 2}, 2))
    assert fault.key == "parallel.ep"


def test_ranks_that_share_a_row(registry):
    def keys(layout, *overrides, transforms=None):
        job = _Job(load_recipe("debug-moe", list(overrides), registry=registry).job.model)
        job.transforms = transforms or {}
        return [fault.key for fault in experts_see_other_tokens(job, Layout.parse(layout))]

    for layout in ("dp2", "tp2", "cp2", "dp2cp2tp2ep4"):
        assert keys(layout) == []
    whole = {"tensor": TensorParallel(sequence_parallel=False)}
    assert keys("tp2", transforms=whole) == ["transforms.tensor.sequence_parallel"]
    assert keys("dp2", transforms=whole) == []
    dense = _Job(load_recipe("debug", registry=registry).job.model)
    assert not list(experts_see_other_tokens(dense, Layout.parse("dp2tp2")))


NODES = "train.micro_batch=2 parallel.dp_shard=4 parallel.ep=4 transforms.expert.dispatcher='hierarchical'"
WIDTH = "parallel.tp=3 parallel.etp=3 model.heads=3 model.kv_heads=3 model.dim=48 data.sequence_length=48"


@pytest.mark.parametrize(
    ("world", "overrides", "keys"),
    [
        (6, "parallel.dp_shard=6 parallel.ep=3 train.global_batch=12 train.micro_batch=1", "model.moe.experts"),
        (4, "parallel.dp_shard=4 parallel.ep=3", "parallel"),
        (2, "parallel.dp_shard=2 parallel.ep=2 parallel.etp=2", "parallel"),
        (3, WIDTH, "model.moe.ffn_dim"),
        (2, "parallel.dp_shard=2 parallel.ep=2 model.moe='none'", "parallel.ep"),
        (2, "parallel.tp=2 transforms.tensor.sequence_parallel=false", "parallel transforms.tensor.sequence_parallel"),
        (2, "parallel.cp=2 model.moe.losses.sequence=0.1", "model.moe.losses.sequence"),
        (4, f"{NODES} transforms.expert.ranks_per_node=4", "transforms.expert.ranks_per_node"),
        (4, f"{NODES} transforms.expert.ranks_per_node=2", ""),
        (4, "parallel.dp_shard=2 parallel.tp=2 parallel.ep=2 parallel.etp=2", ""),
    ],
)
def test_check_refuses_what_does_not_fit_and_names_the_keys(registry, world, overrides, keys):
    found = []
    try:
        load_recipe("debug-moe", [f"--{override}" for override in overrides.split()], world, registry)
    except ConfigError as refusal:
        found = [fault.key for fault in refusal.faults]
    assert sorted(found) == keys.split()


def test_what_cannot_be_compiled_is_refused(registry):
    model = load_recipe("debug-moe", registry=registry).job.model
    assert not list(experts_compile(_Job(model, transforms=["compile"]), Layout()))
    assert not list(experts_compile(_Job(model, "fp32"), Layout()))
    odd = load_recipe("debug-moe", ["--model.moe.kernel=loop", "--model.moe.ffn_dim=36"], registry=registry).job.model
    faults = list(experts_compile(_Job(odd, "fp32", ["compile"]), Layout()))
    assert [fault.key for fault in faults] == ["model.moe.kernel", "precision.compute", "model.moe.ffn_dim"]


def test_check_says_which_keys_depend_on_the_layout(capsys, registry):
    assert load_recipe("debug-moe", registry=registry).job.model.layout_dependent == ()
    with pytest.raises(SystemExit) as ended:
        main(["check", "debug-moe", "--json", "--model.moe.losses.micro_batch=0.1", "--model.moe.capacity=1.5"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout_dependent"] == ["model.moe.losses.micro_batch", "model.moe.capacity"]
    assert Losses().any() is False


def test_a_renamed_key_says_its_new_name(registry):
    with pytest.raises(ConfigError, match=r"model\.prediction: unknown key; its name is now 'model\.mtp'"):
        load_recipe("debug", ["--model.prediction.depth=1"], 1, registry)
