"""The hook `routing`: numbers of a layer by hand, the file for the report, the heat map, and what it refuses."""

import json
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig, SoftmaxTopKConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.launch.watch import Watch
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.pipeline.definition import Pipeline
from forge_parallel.pipeline.schedules import OneForwardOneBackward
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_parallel.verify.parity import Case, share, synthetic
from forge_train.directory import ROUTING
from forge_train.hooks.routing import RoutingStatistics
from forge_train.report.html import heat
from forge_train.report.page import page
from forge_train.report.record import RunRecord
from forge_train.run.training import Clock

SIZES = {"dim": 16, "layers": 2, "heads": 2, "ffn_dim": 24, "vocab_size": 53, "max_length": 64}


def made(tmp_path, router):
    config = DecoderConfig(**SIZES, moe=MoEConfig(experts=4, first_dense=1, router=router))
    layout = Layout()
    topology = Topology.of(layout, torch.device("cpu"))
    model = realize(Blueprint.of(config.build), Plan.of([], layout), topology, 0)
    logged = []
    run = SimpleNamespace(
        watch=Watch(),
        job=SimpleNamespace(model=config),
        model=model,
        topology=topology,
        directory=tmp_path,
        state=SimpleNamespace(step=10),
        clock=Clock(),
        log=logged.append,
        judge=lambda: None,
    )
    return run, logged


@pytest.mark.parametrize("router", [SoftmaxTopKConfig(), SigmoidTopKConfig(bias_rate=0.5)])
def test_numbers_are_those_of_the_step_and_the_report_shows_them(tmp_path, router):
    run, logged = made(tmp_path, router)
    hook = RoutingStatistics(every=10).build()
    hook.start(run)
    hook.after_step(run, None)
    assert not logged and not (tmp_path / ROUTING).exists()  # no step was made yet
    # Load, dropped, tokens, entropy, loss: 8 tokens, 2 slots each.
    totals = torch.tensor([8.0, 4, 3, 1, 2, 0, 0, 0, 8, 4.0, 2.0], dtype=torch.float64)
    run.model.part.blocks["1"].mlp.after_step(totals, torch.zeros(()))
    run.state.step = 20
    hook.after_step(run, None)
    expected = {"load_max": 2.0, "load_min": 0.25, "entropy": 0.5, "dropped": 2 / 16, "loss": 0.25}
    if isinstance(router, SigmoidTopKConfig):
        expected |= {"bias_max": 0.5, "bias_min": -0.5}
    assert logged == [{f"routing/blocks.1/{name}": value for name, value in expected.items()}]
    kept = json.loads((tmp_path / ROUTING).read_text())
    assert kept == {"step": 20, "layers": {"blocks.1": [2.0, 1.0, 0.75, 0.25]}}
    drawn = page([RunRecord("run", summary={"routing": kept})])
    assert "Load of experts" in drawn and "blocks.1, expert 2: 0.75" in drawn
    assert "Load of experts" not in page([RunRecord("run")])


def _looked_at(layout: str, directory: Path) -> list[dict[str, float]]:
    """What a rank logs after two steps on its share of the same rows."""
    config = DecoderConfig(
        **SIZES | {"layers": 4}, moe=MoEConfig(experts=4, first_dense=1, router=SigmoidTopKConfig(bias_rate=0.5))
    )
    at = Layout.parse(layout)
    topology = Topology.of(at, torch.device("cpu"))
    pipeline = Pipeline(OneForwardOneBackward().build()) if at.pp > 1 else None
    model = realize(
        Blueprint.of(config.build), Plan.of([FullyShard(), TensorParallel(), ExpertParallel()], at, pipeline), topology, 0
    )
    case, step = Case(config.build, CrossEntropy().build(), AdamWConfig().build, 53), Step(model, CrossEntropy().build())
    logged: list[dict[str, float]] = []
    job, state = SimpleNamespace(model=config), SimpleNamespace(step=10)
    run = SimpleNamespace(
        watch=Watch(),
        job=job,
        model=model,
        topology=topology,
        directory=directory,
        state=state,
        clock=Clock(),
        log=logged.append,
        judge=lambda: None,
    )
    for number in range(2):
        step(share(synthetic(case, number), topology.data_rank, topology.data_size, 1))
    hook = RoutingStatistics(every=10).build()
    hook.start(run)
    hook.after_step(run, None)
    return logged


@pytest.mark.parametrize("layout", ["pp2", "dp2pp2ep2", "dp2tp2ep4"])
def test_one_rank_logs_the_layers_of_all(world, tmp_path, layout):
    """Every stage has layers of its own, every rank counted other tokens."""
    (alone,) = _looked_at("1", tmp_path)
    whole = json.loads((tmp_path / ROUTING).read_text())
    assert {key.split("/")[1] for key in alone} == {"blocks.1", "blocks.2", "blocks.3"}
    (tmp_path / ROUTING).unlink()
    first, *others = world.run(_looked_at, Layout.parse(layout).world, layout, tmp_path)
    assert others == [[]] * len(others)
    assert first == [{key: pytest.approx(value, rel=1e-5) for key, value in alone.items()}]
    assert json.loads((tmp_path / ROUTING).read_text()) == whole


def test_shades_are_half_the_load():
    root = ElementTree.fromstring(heat("t", "<n>", {"a": [0.0, 1.0, 2.0, 9.0], "b": [1.0] * 4}))
    cells = [cell for cell in root if cell.tag == "rect"]
    assert [cell.get("fill-opacity") for cell in cells[:4]] == ["0.00", "0.50", "1.00", "1.00"]
    assert len({cell.get("y") for cell in cells}) == 2
    assert heat("t", "", {}) == ""


def test_a_dense_model_has_nothing_to_show_and_trains_on(tmp_path):
    run, logged = made(tmp_path, SoftmaxTopKConfig())
    run.job = SimpleNamespace(model=DecoderConfig(**SIZES))
    hook = RoutingStatistics(every=1).build()
    hook.start(run)
    hook.after_step(run, None)
    hook.finish(run)
    assert not logged and not (tmp_path / ROUTING).exists()
