"""Files that a foreign loop writes and reads: those of torch hold the whole model, or the attempt is refused."""

import io
import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.optim.swa_utils import AveragedModel

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel import ParallelizedModule, parallelize
from forge_parallel.placement.boxes import local_box
from harness.pool import World
from harness.siblings import fast
from parallel.foreign_modules import PLAN, VOCAB, tied

TOKENS = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(5))
LAYOUTS = ["dp2", "tp2", "pp2"]


def _model(layout: str, seed: int = 0) -> ParallelizedModule:
    module = tied().double()
    module.load_state_dict(_right(seed))
    return parallelize(module, layout, tp_plan=PLAN if "tp" in layout else None, state="fp64", compute="fp64")


def _right(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: value.double() for name, value in tied().state_dict().items()}


def _train(model: ParallelizedModule, optimizer: torch.optim.Optimizer) -> None:
    model.step([{"tokens": TOKENS[:2]}, {"tokens": TOKENS[2:]}], lambda out, _: out.square().sum())
    optimizer.step()
    optimizer.zero_grad()


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _refused_saves(layout: str) -> dict[str, str]:
    model = _model(layout)
    state = model.state_dict()
    things: dict[str, Any] = {
        "state": state,
        "nested": {"model": state, "step": 3},
        "copied": dict(state),
        "deep copy": deepcopy(state),
        "parameters": dict(model.named_parameters()),
        "model": model,
        "parts": [part.state_dict() for part in model.parts],
        "within": nn.ModuleDict({"model": model}).state_dict(),
    }
    if "pp" not in layout:
        things["average"] = AveragedModel(model).state_dict()
        things["torch's"] = get_model_state_dict(model.module)
    found = {}
    for name, thing in things.items():
        try:
            torch.save(thing, io.BytesIO())
        except PlanError as refusal:
            found[name] = str(refusal)
        assert name in found, f"{name} was saved"
    with pytest.raises(PlanError, match="share"):
        pickle.dumps(state)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_of_one_ranks_shares_is_refused_with_the_line_to_write(world: World, layout: str) -> None:
    for found in world.run(_refused_saves, 2, layout):
        assert len(found) == (8 if "pp" in layout else 10)
        for refusal in found.values():
            assert "state = model.state_dict(whole=True) on all ranks" in refusal
            assert "torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=...)" in refusal


def _saved_whole(layout: str, path: str) -> bool:
    model = _model(layout)
    before = model.state_dict(whole=True)
    if dist.get_rank() == 0:
        torch.save(before, path)
    dist.barrier()
    other = _model(layout, seed=1)
    differs = not _equal(other.state_dict(whole=True), before)
    other.load_state_dict(torch.load(path))
    return differs and _equal(other.state_dict(whole=True), before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_state_is_a_plain_file(world: World, layout: str, tmp_path: Path) -> None:
    assert world.run(_saved_whole, 2, layout, str(tmp_path / "model.pt")) == [True, True]
    plain = tied().double()
    plain.load_state_dict(torch.load(tmp_path / "model.pt"), strict=True)
    assert _equal(dict(plain.state_dict()), _right())


def test_one_process_saves_and_loads_as_any_module(tmp_path: Path) -> None:
    model = _model("1")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert _equal(torch.load(tmp_path / "model.pt"), _right())


def _locals(model: ParallelizedModule) -> dict[str, Tensor]:
    return {name: local_box(tensor).local.clone() for name, tensor in model.tensors()}


def _of_another_rank(layout: str, path: str) -> tuple[str, bool, bool]:
    """What a file that escaped the refusal, as one of older code would, does when all ranks load it."""
    model = _model(layout)
    before = model.state_dict(whole=True)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(own, f"{path}{dist.get_rank()}")
    dist.barrier()
    other = _model(layout, seed=1)
    started = other.state_dict(whole=True)
    try:
        other.load_state_dict(torch.load(f"{path}0", weights_only=False))
        refusal = ""
    except PlanError as error:
        refusal = str(error)
    unchanged = _equal(_locals(other), _locals(_model(layout, seed=1)))
    dist.barrier()
    other.load_state_dict(torch.load(f"{path}{dist.get_rank()}", weights_only=False))
    return refusal, unchanged, _equal(other.state_dict(whole=True), before) and not _equal(started, before)


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_the_share_of_another_rank_is_refused(world: World, layout: str, tmp_path: Path) -> None:
    """DTensors of one rank's file have the global shapes; all ranks that load it would each take that rank's values."""
    (_, _, first), (refusal, unchanged, second) = world.run(_of_another_rank, 2, layout, str(tmp_path / "rank"))
    assert "embed.weight is the share of rank 0, but this is rank 1; write state = model.state_dict(whole=True)" in refusal
    assert unchanged
    assert first and second, "each rank's own file loads"


def _written(layout: str, path: str) -> None:
    model = _model(layout)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)


def _read(layout: str, path: str) -> tuple[Any, dict[str, Tensor]]:
    model = _model(layout, seed=1)
    if "pp" not in layout:
        model(TOKENS)  # FSDP keeps copies of some weights for a backward
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    keys = model.load_state_dict(state["model"])
    return [*keys.missing_keys, *keys.unexpected_keys], model.state_dict(whole=True)


PAIRS = [(one, other) for one in [*LAYOUTS, "dp2tp2", "pp2dp2"] for other in [*LAYOUTS, "dp2tp2", "pp2dp2"]]


@pytest.mark.parametrize(("layout", "other"), fast(("dp2", "pp2"), ("pp2", "tp2"), ("tp2", "tp2"), of=PAIRS))
def test_a_checkpoint_of_torch_holds_the_model_and_loads_in_any_layout(
    world: World, layout: str, other: str, tmp_path: Path
) -> None:
    world.run(_written, Layout.parse(layout).world, layout, str(tmp_path / "checkpoint"))
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "model.pt")
    assert _equal(torch.load(tmp_path / "model.pt")["model"], _right())
    for keys, found in world.run(_read, Layout.parse(other).world, other, str(tmp_path / "checkpoint")):
        assert keys == []
        assert _equal(found, _right())


def _resumed(layout: str, path: str) -> tuple[bool, bool]:
    model = _model(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    _train(model, optimizer)
    weights, states = get_state_dict(model.module, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)
    _train(model, optimizer)

    other = _model(layout, seed=1)
    resumed = torch.optim.AdamW(other.parameters(), lr=0.01)
    weights, states = get_state_dict(other.module, resumed)
    whole = {"model": weights, "optimizer": states}
    dcp.load(whole, checkpoint_id=path)
    set_state_dict(other.module, resumed, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])
    at = _equal(other.state_dict(whole=True), model.state_dict(whole=True))
    _train(other, resumed)
    return at, _equal(other.state_dict(whole=True), model.state_dict(whole=True))


@pytest.mark.parametrize("layout", fast("dp2", of=["dp2", "tp2", "dp2tp2"]))
def test_torchs_state_of_model_and_optimizer_resumes_bit_for_bit(world: World, layout: str, tmp_path: Path) -> None:
    ranks = Layout.parse(layout).world
    assert world.run(_resumed, ranks, layout, str(tmp_path / "checkpoint")) == [(False, True)] * ranks


def _hints(layout: str) -> list[str]:
    model = _model(layout)
    assert not hasattr(model, "no_such_thing")
    found = []
    for call in (lambda: get_model_state_dict(model), lambda: model.blocks):
        with pytest.raises(AttributeError) as error:
            call()
        found.append(str(error.value))
    return found


def test_the_modules_own_attributes_are_refused_with_where_they_are(world: World) -> None:
    for layout, where in (("dp2", "write model.module.blocks, or pass model.module"), ("pp2", "look at model.parts")):
        for found in world.run(_hints, 2, layout):
            assert all("has no attribute 'blocks'" in text and where in text for text in found)


def _accumulated(layout: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """A loop for DistributedDataParallel: three micro-batches a step, of which the first two are not synchronized; before them
    one whose gradients are thrown away."""
    model = _model(layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = TOKENS.repeat(3, 1).add(torch.arange(12)[:, None]).remainder(VOCAB)
    mine = rows.chunk(model.data_ranks)[model.data_rank].chunk(3)
    with model.no_sync():
        model(TOKENS).square().sum().backward()
    optimizer.zero_grad()
    for _ in range(2):
        with model.no_sync():
            for part in mine[:2]:
                (model(part).square().mean() / 3).backward()
                with torch.no_grad():
                    model(TOKENS)
        (model(mine[2]).square().mean() / 3).backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(whole=True), [rows]


@pytest.mark.parametrize("layout", fast("dp2", "tp2", of=["1", "dp2", "tp2", "dp2tp2", "hsdp2x1"]))
def test_a_loop_with_no_sync_accumulates_as_one_process(world: World, layout: str) -> None:
    results = world.run(_accumulated, Layout.parse(layout).world, layout)
    plain = tied().double()
    plain.load_state_dict(_right())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    (rows,) = results[0][1]
    for _ in range(2):
        plain(rows).square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for weights, _ in results:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)


def _no_sync_of_stages() -> str:
    with pytest.raises(PlanError) as refusal:
        _model("pp2").no_sync()
    return str(refusal.value)


def test_no_sync_of_a_pipeline_is_refused(world: World) -> None:
    for refusal in world.run(_no_sync_of_stages, 2):
        assert "write model.step(batches, loss, tokens) with all micro-batches of an optimizer step" in refusal


def _all_alike() -> list[str]:
    """Ranks hash names differently, and reading DTensors of another layout is collective: one order, or ranks mix tensors up."""
    model, other = _model("dp2"), _model("tp2", seed=1)
    other.load_state_dict(model.state_dict())
    found = other.state_dict(whole=True)
    return [name for name, value in _right().items() if not torch.equal(found[name], value)]


def test_a_state_of_another_layout_loads_in_one_order_on_all_ranks(world: World) -> None:
    assert world.run(_all_alike, 2, fresh=True) == [[], []]
