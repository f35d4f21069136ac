"""Padding is no token: not for experts, not in counts of tokens, not in throughput."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from forge_core.batch import IGNORE, Batch
from forge_data.components import Tokens
from forge_data.loading.evaluation import evaluation
from forge_data.loading.stream import open_stream
from forge_data.section import Data
from forge_lab.scaling.runs import gather
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_parallel.step.reduce import begin_statistics
from forge_parallel.transforms.context.cores import cut_rows
from forge_parallel.transforms.context.row_order import SequenceOrder
from forge_train.hooks.metrics import keys_met
from forge_train.run.loop import fit
from harness.siblings import fast
from models.conftest import fill
from train.runs import TINY, prepared, train

LENGTH = 16
LENGTHS = [5, 3, 16, 7, 1, 2, 9, 4, 12, 3, 6, 2]
EOS = 60


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents of LENGTHS; each ends with EOS."""
    ids = np.random.default_rng(5).integers(1, EOS, sum(LENGTHS)).astype(np.uint16)
    ids[np.cumsum(LENGTHS) - 1] = EOS
    np.save(tmp_path / "corpus.npy", ids)
    return tmp_path / "corpus.npy"


def data(corpus: Path, packing: Any, **more: Any) -> Data:
    return Data(sequence_length=LENGTH, sources=[Tokens(path=str(corpus), eos=EOS)], packing=packing, shuffle="none", **more)


def steps_of(recipe: Data, workspace: Path, steps: int, batch: int = 4, **more: Any) -> list[list[Batch]]:
    stream = open_stream(recipe, workspace=workspace, seed=0, global_batch=batch, micro_batch=2, **more)
    return [batches for _, (batches, _) in zip(range(steps), stream.from_cursor(stream.start()), strict=False)]


@pytest.mark.parametrize("workers", [0, 1])
def test_trials_b6_rows_tell_padding_where_documents_are_ignored(corpus: Path, tmp_path: Path, workers: int) -> None:
    ignored = data(corpus, "pad", documents="ignore", loader_workers=workers)
    masked = steps_of(data(corpus, "pad"), tmp_path, 3)
    for alone, told in zip(steps_of(ignored, tmp_path, 3), masked, strict=True):
        for batch, other in zip(alone, told, strict=True):
            assert batch.documents is None and batch.positions is None and batch.tokens.equal(other.tokens)
            assert batch.real is not None and batch.real.equal(other.real)
    counts = [row.sum().item() for batches in masked for batch in batches for row in batch.real]
    assert counts == LENGTHS


def test_trials_b6_rows_without_padding_have_no_mask(corpus: Path, tmp_path: Path) -> None:
    (step,) = steps_of(data(corpus, "concatenate", documents="ignore"), tmp_path, 1)
    assert all(batch.token_mask is None and batch.real is None for batch in step)
    full = data(corpus, "pad", documents="ignore")
    third, fourth = (batch for batch in steps_of(dataclasses.replace(full, sequence_length=1), tmp_path, 1)[0])
    assert third.token_mask is None and fourth.token_mask is None


def test_trials_b6_evaluation_tells_padding_in_every_packing(corpus: Path, tmp_path: Path) -> None:
    for packing in ("concatenate", "pad", "best_fit"):
        found = {}
        for documents in ("mask", "ignore"):
            recipe = data(corpus, packing, documents=documents, evaluation={"held": Tokens(path=str(corpus), eos=EOS)})
            held = evaluation(recipe, workspace=tmp_path)["held"]
            found[documents] = [(batch.tokens, batch.real) for batch in held.batches(0, 1, 3)]
        for (tokens, told), (same, real) in zip(found["mask"], found["ignore"], strict=True):
            assert tokens.equal(same) and (told.all() if real is None else real.equal(told))


@pytest.mark.parametrize("packing", ["pad", "best_fit"])
def test_trials_b6_experts_see_no_padding_where_documents_are_ignored(corpus: Path, tmp_path: Path, packing: str) -> None:
    """Capacity is counted over the tokens of a forward, so padding would take places of real tokens."""
    sizes = {"dim": 16, "layers": 2, "heads": 2, "ffn_dim": 24, "vocab_size": 61, "max_length": LENGTH}
    model: Any = DecoderConfig(**sizes, moe=MoEConfig(experts=4, top_k=2, capacity=0.75)).build()  # type: ignore[arg-type]
    fill(model, model.specs(), 3)
    model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.normal_(0, 1, generator=torch.Generator().manual_seed(1))
    needs = model.specs().needs
    for batches in steps_of(data(corpus, packing, documents="ignore"), tmp_path, 2):
        for row in (row for batch in batches for row in rows_of(batch)):
            count = LENGTH if row.real is None else int(row.real.sum())
            model.eval()
            expected, found = model(row.tokens[:, :count]), model(row.tokens, **row.inputs(needs))[:, :count]
            assert (found - expected).abs().max() < 1e-12
            model.train()
            layer = model.blocks["0"].mlp
            layer.before_step(torch.ones((), dtype=torch.float64))
            model(row.tokens, **row.inputs(needs))
            assert layer.statistics()[:4].sum() == 2 * count  # slots of two experts for each token


def rows_of(batch: Batch) -> list[Batch]:
    """Each row as a batch: what the experts of other rows do would take part in capacity."""
    masks = [None if batch.token_mask is None else batch.token_mask[[row]] for row in range(len(batch.tokens))]
    return [Batch(batch.tokens[[row]], batch.labels[[row]], token_mask=mask) for row, mask in enumerate(masks)]


def test_trials_b6_a_mask_travels_with_its_batch_and_reaches_only_models_that_need_it() -> None:
    tokens = torch.tensor([[5, 6, 0, 0]])
    batch = Batch(tokens, torch.tensor([[6, IGNORE, IGNORE, IGNORE]]), token_mask=tokens > 0)
    assert "token_mask" in batch.inputs(("token_mask",)) and "token_mask" not in batch.inputs(())
    assert batch.to("cpu").real is not None and batch.real is not None
    targets = batch.with_mtp_targets(2).mtp_targets
    assert targets is not None
    assert targets.tokens[0].tolist() == [[6, IGNORE], [IGNORE] * 2, [IGNORE] * 2, [IGNORE] * 2]


MOE = """
[model.moe]
experts = 4
top_k = 2
capacity = 0.75
ffn_dim = 16
losses = { sequence = 0.5, global_batch = 0.5, z = 0.1 }
"""


def test_trials_b6_a_run_with_one_document_a_row_learns_the_same_whether_documents_are_ignored(
    corpus: Path, tmp_path: Path
) -> None:
    """Experts, their losses and what these are divided by: all of them count tokens."""
    losses = []
    for documents in ("mask", "ignore"):
        path = recipe_of(corpus, tmp_path / f"{documents}.toml", MOE, f'documents = "{documents}"')
        losses.append(train(path, [f"--job.dir={tmp_path / documents}", "--train.max_steps=4"])["losses"])
    assert losses[0] == pytest.approx(losses[1], abs=2e-6) and losses[0][3] < losses[0][0]


def recipe_of(corpus: Path, path: Path, tables: str = "", line: str = "") -> Path:
    source = f'name = "tokens"\npath = "{corpus}"\neos = {EOS}\n'
    recipe = TINY.replace('name = "random"\nvocab_size = 61\ntokens = 4000\ndocument = 23\n', source)
    path.write_text(recipe.replace("[data]\n", f'{tables}\n[data]\npacking = "pad"\nshuffle = "none"\n{line}\n'))
    return path


def test_trials_b6_a_token_of_a_step_weighs_one_by_its_tokens(corpus: Path, tmp_path: Path) -> None:
    for documents in ("mask", "ignore"):
        (batches,) = steps_of(data(corpus, "pad", documents=documents), tmp_path, 1)
        weights: list[float] = []
        observer: Any = SimpleNamespace(before_step=lambda weight, kept=weights: kept.append(float(weight)))
        topology = SimpleNamespace(device=torch.device("cpu"), coordinates={"tp": 0}, stage_sum=lambda count: count)
        begin_statistics([observer], SimpleNamespace(topology=topology), batches)  # type: ignore[arg-type]
        assert weights == [1 / sum(LENGTHS[:4])]


@pytest.mark.parametrize("balanced", [False, True])
def test_trials_b6_ranks_that_share_rows_cut_the_mask_with_them(balanced: bool) -> None:
    tokens = torch.arange(1, 17).view(2, 8)
    batch = Batch(tokens, tokens, token_mask=tokens % 3 > 0)
    for rank in range(2):
        kept = cut_rows(batch, SequenceOrder(2, balanced), rank, "ring")
        assert kept.real is not None and kept.real.equal(kept.tokens % 3 > 0)


@pytest.mark.parametrize("documents", ["mask", "ignore"])
@pytest.mark.parametrize("packing", ["pad", "best_fit", "concatenate"])
def test_trials_c2_tokens_of_a_step_are_those_that_its_rows_hold(
    corpus: Path, tmp_path: Path, packing: Any, documents: Any
) -> None:
    recipe = data(corpus, packing, documents=documents)
    stream = open_stream(recipe, workspace=tmp_path, seed=0, global_batch=4, micro_batch=2)
    for step, (batches, _) in zip(range(5), stream.from_cursor(stream.start()), strict=False):
        held = sum(batch.tokens.numel() if batch.real is None else int(batch.real.sum()) for batch in batches)
        assert stream.tokens_at(step) == held
    if packing == "pad":
        assert [stream.tokens_at(step) for step in range(3)] == [sum(LENGTHS[first : first + 4]) for first in (0, 4, 8)]
        (described,) = stream.describe(3)["sources"]
        assert described["tokens_read"] == stream.mix(3)["tokens"][0] == sum(LENGTHS) and described["epochs"] == 1


def test_trials_c2_a_run_counts_tokens_and_not_padding(corpus: Path, tmp_path: Path) -> None:
    path = recipe_of(corpus, tmp_path / "pad.toml", '[[hooks]]\nname = "log"\nevery = 1\n')
    run, _ = prepared(path, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=3"])
    lines: list[dict[str, float]] = []
    run.log = lambda values: lines.append(dict(values))  # type: ignore[method-assign]
    fit(run)
    every = [LENGTHS[row % len(LENGTHS)] for row in range(3 * 8)]
    assert run.state.tokens == sum(every)
    assert [line["tokens"] for line in lines] == [sum(every[: 8 * step]) for step in (1, 2, 3)]
    rates = [line["tokens_per_second"] * line["step_seconds"] for line in lines]
    assert rates == pytest.approx([sum(every[8 * step : 8 * step + 8]) for step in range(3)])


@pytest.mark.parametrize("documents", ["mask", "ignore"])
def test_trials_c2_keys_met_are_those_of_tokens(corpus: Path, tmp_path: Path, documents: Any) -> None:
    (batches,) = steps_of(data(corpus, "pad", documents=documents), tmp_path, 1)
    keys = sum(length * (length + 1) / 2 for length in LENGTHS[:4])
    assert keys_met(batches, LENGTH, None) == pytest.approx(keys / sum(LENGTHS[:4]))


@pytest.mark.parametrize("packing", fast("pad", of=["pad", "best_fit", "concatenate"]))
def test_trials_c2_the_tokens_of_a_law_are_no_padding(corpus: Path, tmp_path: Path, packing: str) -> None:
    """D of runs over one and a half epochs: what the documents of their rows hold, summed by hand from the ids that they read."""
    tables = '[[hooks]]\nname = "log"\nevery = 1\n[[trackers]]\nname = "jsonl"\n'
    path = recipe_of(corpus, tmp_path / "law.toml", tables)
    path.write_text(path.read_text().replace('packing = "pad"', f'packing = "{packing}"'))
    steps, held = (2, 3, 4), {}
    for last in steps:
        where = tmp_path / f"run-{last}"
        found = train(path, [f"--job.dir={where}", f"--job.name=run-{last}", f"--train.max_steps={last}", "--schedule.warmup=0"])
        rows = [row for step in found["samples"] for row in step]
        ids = [np.frombuffer(bytes.fromhex(row), dtype=np.int64) for row in rows]
        assert all(len(row) == LENGTH for row in ids) and len(ids) == 8 * last
        held[f"run-{last}"] = sum(int((row != 0).sum()) for row in ids)  # no document has the id 0, which pads
    given = gather([tmp_path / f"run-{last}" for last in steps], metric="loss")
    assert {run.name: run.tokens for run in given.runs} == held
    padded = [held[f"run-{last}"] < 8 * last * LENGTH for last in steps]
    assert padded == [packing != "concatenate"] * 3
    if packing == "pad":
        assert list(held.values()) == [sum(LENGTHS[row % len(LENGTHS)] for row in range(8 * last)) for last in steps]
