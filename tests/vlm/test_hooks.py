"""Numbers by modality: against logits, by hand; in layouts against one process; and what images are worth to a model."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from forge_core.batch import Batch
from forge_core.layout import Layout
from forge_models.objectives import CrossEntropy
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.boxes import local_box
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_train.report.charts import charts
from forge_train.report.record import read_record
from forge_train.run.loop import fit
from forge_train.run.training import Clock
from forge_vlm.components.fusions import JointDecoder
from forge_vlm.context import Modalities
from forge_vlm.hooks import ModalityObjective, ModalityStatistics, predict, swap_images, token_shares
from harness.pool import World
from harness.siblings import fast
from train.runs import TINY, prepared
from vlm.tiny import MODELS, build

CPU = torch.device("cpu")


def _batch(rows: list[list[int]], labels: list[list[int]], first: float, shape: tuple[int, ...] = (1,)) -> Batch:
    """Images are numbers from `first` on."""
    count = sum(number >= 0 for row in rows for number in row)
    images = torch.stack([torch.full(shape, first + number) for number in range(count)])
    tokens = torch.zeros(len(rows), len(labels[0]), dtype=torch.int64)
    return Batch(tokens, torch.tensor(labels), extras={"images": images, "image_rows": torch.tensor(rows), "prefix": tokens > 0})


def test_each_row_gets_images_of_another_row() -> None:
    """Images 0, 1 | 2 | 10 | 11 of four rows, by two places: 2, 10 | 11 | 0 | 1. Row 1 of the first batch has no image."""
    one = _batch([[0, 1], [-1, -1], [2, -1]], [[1, 2], [3, 4], [5, -100]], 0.0)
    two = _batch([[0], [1]], [[6, -100], [-100, -100]], 10.0)
    (first, second), labels = swap_images([one, two])
    assert first.extras["images"].flatten().tolist() == [2.0, 10.0, 11.0]
    assert second.extras["images"].flatten().tolist() == [0.0, 1.0]
    assert labels == 2 + 1 + 1 + 0
    assert torch.equal(first.extras["image_rows"], one.extras["image_rows"]) and first.extras["prefix"] is one.extras["prefix"]
    assert one.extras["images"].flatten().tolist() == [0.0, 1.0, 2.0]


def test_images_that_no_other_row_can_give_stay() -> None:
    """Row 0 has two images and row 1 has one. A shift by two would give row 0 one of the images that it had before."""
    few = _batch([[0, 1], [2, -1]], [[1, 2], [3, 4]], 0.0)
    plain = Batch(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64))
    found, labels = swap_images([few, plain])
    assert labels == 0 and torch.equal(found[0].extras["images"], few.extras["images"]) and found[1] is plain
    wide = _batch([[0], [1]], [[1, -100], [1, 1]], 5.0, (2,))  # of another shape: only among themselves
    (kept, _, other), labels = swap_images([few, plain, wide])
    assert kept is few and labels == 3 and other.extras["images"][:, 0].tolist() == [6.0, 5.0]


def test_loss_and_accuracy_of_a_modality_are_those_of_its_labels() -> None:
    """Discrete tokens of images are labels too; from the logits of the model, one token at a time."""
    component = replace(MODELS["joint"], images="tokens", modalities={"image": (30, 36)}, fusion=JointDecoder())
    model = build(component)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(40, (3, 50), generator=generator) for _ in range(2))
    labels[torch.rand(3, 50, generator=generator) < 0.3] = -100
    logits = model(tokens)
    assert isinstance(logits, torch.Tensor)
    labels[0, :9] = logits[0, :9].argmax(-1)
    objective = ModalityObjective(Modalities({"image": (30, 36)}))
    terms: Any = model(tokens, labels=labels, objective=objective)
    image = (labels >= 30) & (labels < 36)
    for name, here in (("image", image), ("text", ~image & (labels != -100))):
        assert terms.metrics[f"loss/{name}"].item() == pytest.approx(
            F.cross_entropy(logits[here], labels[here], reduction="sum").item()
        )
        assert terms.metrics[f"tokens/{name}"] == here.sum()
        assert terms.metrics[f"correct/{name}"] == (logits.argmax(-1) == labels)[here].sum() > 0 or name == "image"
    assert terms.tokens == (labels != -100).sum()
    assert terms.sum.item() == pytest.approx(sum(terms.metrics[f"loss/{name}"].item() for name in ("text", "image")))
    assert set(objective.metrics) == terms.metrics.keys()


def test_logits_exist_for_a_few_positions_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_models.blocks.head.chunk_rows", lambda *_: 7)
    hidden, weight, seen = torch.randn(2, 8, 4), torch.randn(9, 4), []

    class Head:
        def __init__(self) -> None:
            self.weight = weight

        def __call__(self, some: torch.Tensor) -> torch.Tensor:
            seen.append(some.shape[1])
            return some @ weight.T

    assert torch.equal(predict(Head(), hidden), (hidden @ weight.T).argmax(-1)) and seen == [3, 3, 2]
    gathering = SimpleNamespace(weight=weight)
    with pytest.raises(ValueError, match="sequence_parallel = false"):
        predict(type("", (), {"weight": weight, "__call__": lambda _, some: torch.cat([some, some], 1) @ weight.T})(), hidden)
    assert gathering.weight is weight


class Pictures:
    """A held-out set whose rows have images."""

    def __init__(self, held_out: Any, model: Any) -> None:
        self.held_out, self.model = held_out, model

    def batches(self, rank: int, ranks: int, micro_batch: int) -> Iterator[Batch]:
        return (self.model.with_extras(batch) for batch in self.held_out.batches(rank, ranks, micro_batch))


RECIPE = (
    TINY.replace('name = "decoder"', 'name = "vlm"')
    .replace("vocab_size = 61\nmax", "vocab_size = 62\nmax")
    .replace(
        "[data]",
        """[model.encoder]
name = "vit"
size = 8
patch = 4
channels = 1
dim = 16
layers = 1
heads = 2

[data.evaluation.held_out]
name = "random"
vocab_size = 61
tokens = 700
document = 23
seed = 5

[data]""",
    )
    + '\n[[hooks]]\nname = "modalities"\nevery = 2\nbatches = 3\n\n[[hooks]]\nname = "routing"\nevery = 2\n'
)


def measured(recipe: Path, overrides: list[str]) -> dict[str, Any]:
    """What a run of two steps has measured at its end; gates are no longer zero."""
    run, _ = prepared(recipe, overrides)
    run.training.evaluations = {"held_out": Pictures(run.evaluations["held_out"], run.model.parts[0])}  # type: ignore[dict-item]
    with torch.no_grad():
        for name, tensor in run.model.tensors():
            if name.endswith("_gate"):
                local_box(tensor).local.fill_(0.25 if "attention" in name else -0.5)
    fit(run)
    for tracker in run.trackers:
        tracker.close()
    held = {name: tensor for name, tensor in run.model.tensors() if name.endswith("_gate") and run.topology.size == 1}
    return {name: value for name, (_, value) in run.results.items()} | {name: float(one.detach()) for name, one in held.items()}


LAYOUTS = {
    "joint_decoder": ["tp=2"],
    "cross_attention": ["dp_shard=2", "dp_replicate=2"],
    "mot": ["pp=2", "dp_shard=2"],
    "moma": ["dp_shard=2"],
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize(
    "fusion", ["joint_decoder", "cross_attention", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mot", "moma"))]
)
def test_a_run_measures_alike_in_every_layout(world: World, recipe: Path, tmp_path: Path, fusion: str) -> None:
    every = ", every=2" if fusion == "cross_attention" else ""
    more = ["--train.max_steps=2", "--schedule.warmup=1", f"--model.fusion={{name='{fusion}'{every}}}"]
    if fusion == "moma":
        more += ["--model.moe={experts=4, top_k=2, ffn_dim=16}", "--optimizer.lr=1e-3"]
    alone = measured(recipe, [f"--job.dir={tmp_path / 'alone'}", *more])
    keys = {f"modality/held_out/text/{what}" for what in ("loss", "accuracy")} | {"modality/held_out/image_gain"}
    shares = {"modality/text/share", "modality/image/share"}
    gates = {"gate/blocks.1/attention", "gate/blocks.1/mlp"} if fusion == "cross_attention" else set()
    assert {name for name in alone if not name.endswith("_gate")} == keys | shares | gates
    assert alone["modality/text/share"] == 1.0 and alone["modality/image/share"] == 0.0
    for name in gates:
        held = alone[f"{name.removeprefix('gate/').replace('/', '.cross.')}_gate"]
        assert alone[name] == pytest.approx(float(torch.tensor(held).tanh()), rel=1e-6) and abs(held) > 0.1
    assert 2 < alone["modality/held_out/text/loss"] < 6 and alone["modality/held_out/image_gain"] != 0
    experts = fusion == "moma"
    for layout in LAYOUTS[fusion]:
        directory = tmp_path / layout
        own = [f"--parallel.{layout}", *(["--transforms.tensor.sequence_parallel=false"] if "tp" in layout else [])]
        own += ["--parallel.ep=2"] if fusion == "moma" else []
        ranks = world.run(measured, 2, recipe, [f"--job.dir={directory}", *more, *own, "--train.micro_batch=2"])
        assert ranks[0] == ranks[1]
        same_rows = "dp" not in layout  # other ranks have other rows, of which three batches are read
        for name, value in ranks[0].items():
            if same_rows or not name.startswith("modality/held_out"):
                assert value == pytest.approx(alone[name], rel=2e-4, abs=2e-5), (layout, name)
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "modality/held_out/image_gain" in line] == [2]
        routed = {name for line in lines for name in line if name.startswith("routing/")}
        assert {"routing/blocks.0.mlp.layers.image/load_max", "routing/blocks.1.mlp.layers.text/entropy"} <= routed or not experts
        assert bool(routed) == experts


@pytest.mark.slow
def test_two_data_ranks_that_read_a_whole_set_have_its_loss(world: World, recipe: Path, tmp_path: Path) -> None:
    more = ["--train.max_steps=2", "--schedule.warmup=1"]
    recipe.write_text(RECIPE.replace("batches = 3", "batches = 100"))
    alone = measured(recipe, [f"--job.dir={tmp_path / 'alone'}", *more])
    (found, _) = world.run(measured, 2, recipe, [f"--job.dir={tmp_path / 'two'}", *more, "--parallel.dp_shard=2"])
    for what in ("loss", "accuracy"):
        assert found[f"modality/held_out/text/{what}"] == pytest.approx(alone[f"modality/held_out/text/{what}"], rel=1e-5)


def test_a_text_model_has_nothing_to_measure(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY + '\n[[hooks]]\nname = "modalities"\nevery = 1\n')
    run, _ = prepared(path, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=2", "--schedule.warmup=1"])
    fit(run)
    assert not any("modality" in name or "gate" in name for name in run.results)


def test_shares_are_those_of_tokens_that_are_not_padding() -> None:
    documents = torch.tensor([[0, 0, 0, 1], [0, 0, -1, -1]])
    first = Batch(torch.tensor([[1, 9, 9, 2], [3, 9, 0, 0]]), documents, documents=documents)
    second = Batch(torch.tensor([[9, 9]]), documents)
    run: Any = SimpleNamespace(batches=[first, second], topology=Topology.of(Layout.parse("1"), CPU))
    assert token_shares(run, Modalities({"image": (9, 10)})) == {"modality/text/share": 3 / 8, "modality/image/share": 5 / 8}


def test_its_time_is_no_time_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((10.0, 12.5))
    monkeypatch.setattr("forge_vlm.hooks.perf_counter", lambda: next(times))
    model = build(MODELS["joint"])
    parts = SimpleNamespace(parts=(model,), specs=model.specs(), tensors=model.named_parameters)
    logged: list[Any] = []
    run: Any = SimpleNamespace(
        model=parts,
        state=SimpleNamespace(step=4),
        watch=SimpleNamespace(enter=lambda *_: None),
        judge=lambda: None,
        topology=Topology.of(Layout.parse("1"), CPU),
        batches=[Batch(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]))],
        evaluations={},
        results={},
        clock=Clock(paused=1.0),
        log=logged.append,
    )
    hook = ModalityStatistics(every=3)
    hook.after_step(run, None)  # type: ignore[arg-type]
    assert not logged
    hook.finish(run)
    assert run.clock.paused == 3.5 and logged == [{"modality/text/share": 1.0, "modality/image/share": 0.0}]


def _told(model: Any, rows: int = 12) -> Batch:
    """Rows of an image and two tokens: of the first one the label is what the image shows, 5 or 6."""
    token, count = model.context.image_token, model.context.per_image
    shown = torch.randint(2, (rows,), generator=torch.Generator().manual_seed(3))
    images = (shown * 2.0 - 1).view(-1, 1, 1, 1).expand(rows, 1, 8, 8).clone()
    tokens = torch.tensor([[token] * count + [1, 2]]).expand(rows, -1).clone()
    labels = torch.full_like(tokens, -100)
    labels[:, -2] = 5 + shown
    return Batch(tokens, labels, extras={"images": images, "image_rows": torch.arange(rows).unsqueeze(1)})


class Told:
    """A held-out set of one batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def batches(self, rank: int, ranks: int, micro_batch: int) -> Iterator[Batch]:
        del rank, ranks, micro_batch
        return iter([self.batch])


@pytest.mark.parametrize("name", fast("cross", "moma-token", of=["joint", "cross", "mot", "moma-token"]))
def test_images_are_worth_something_once_a_model_reads_them(name: str) -> None:
    """Before, gates of cross blocks are shut and the gain is exactly 0. By hand: mean of the label's loss, row by row."""
    component = MODELS[name]
    topology = Topology.of(Layout.parse("1"), CPU)
    model = realize(Blueprint.of(component.build), Plan.of([], topology.layout), topology, 1, "fp32", "fp32")
    step, optimizer, batch = Step(model, CrossEntropy()), AdamWConfig(lr=1e-2).build(model), _told(model.part)
    job = SimpleNamespace(train=SimpleNamespace(micro_batch=12))
    run: Any = SimpleNamespace(step=step, topology=topology, model=model, job=job)
    hook, known = ModalityStatistics(), model.part.context.modalities  # type: ignore[union-attr]
    told: Any = Told(batch)
    before = hook._evaluated(run, known, "told", told)  # type: ignore[arg-type]
    assert abs(before["modality/told/image_gain"]) < (1e-9 if name == "cross" else 0.1)
    for _ in range(60):
        result = step([batch])
        optimizer.step(result.skip)
        optimizer.zero_grad()
    found = hook._evaluated(run, known, "told", told)  # type: ignore[arg-type]
    assert found["modality/told/text/accuracy"] == 1.0 and found["modality/told/text/loss"] < 0.05
    assert found["modality/told/image_gain"] > 1.0
    losses = []
    for images in (batch.extras["images"], batch.extras["images"].roll(-1, 0)):  # one image a row: that of the row behind
        with torch.no_grad(), model.inference():
            logits = model.part(batch.tokens, images=images, image_rows=batch.extras["image_rows"])
        losses.append(F.cross_entropy(logits[:, -2].double(), batch.labels[:, -2]))
    assert found["modality/told/image_gain"] == pytest.approx(float(losses[1] - losses[0]), rel=1e-4)


def test_the_report_draws_them_in_a_section(recipe: Path, tmp_path: Path) -> None:
    measured(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=2", "--schedule.warmup=1"])
    drawn = {chart.title: chart for chart in charts([read_record(tmp_path / "run")]) if chart.section == "Modalities"}
    assert set(drawn) >= {"Loss by modality", "Accuracy by modality", "Image gain", "Tokens by modality"}
    assert drawn["Loss by modality"].labels == ["held_out/text"] and drawn["Image gain"].labels == ["held_out"]
