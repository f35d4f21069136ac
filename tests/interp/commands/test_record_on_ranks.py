"""What ranks store together is what one process stores, token by token; what stops one rank stops all, and goes on."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ckpt.world import SingleProcessWorld
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_interp.commands import ranks, ranks_store
from forge_interp.commands.probe import CaptureRequest
from forge_interp.commands.ranks_store import record_sharded
from forge_interp.store import ActivationStore, record
from forge_interp.tap_names import InterpError
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_parallel.launch.environment import read_launcher
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from harness.pool import World
from harness.siblings import fast
from parallel.pipelines import piped

DENSE = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=26, vocab_size=37, max_length=16)
MODELS = {"dense": DENSE, "experts": replace(DENSE, moe=MoEConfig(experts=4, top_k=2, ffn_dim=8))}
NAMES = ("blocks.*.residual_after", "blocks.1.attention.heads", "blocks.0.attention.k")
SELECTIONS: dict[str, dict[str, Any]] = {
    "all": {"names": [*NAMES, "blocks.0.mlp.added", "norm"]},
    "last": {"names": NAMES, "positions": "last"},
    "mean": {"names": NAMES, "positions": "mean"},
    "listed": {"names": "attention.heads", "layers": [-1], "heads": [3, 1], "positions": [4, 0, 4]},
}
SHARD = 16 * 1024
"""A few inputs in fp64."""


def inputs() -> list[torch.Tensor]:
    """Eleven, of 5 to 10 tokens."""
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(0, 37, (5 + 7 * number % 6,), generator=draw) for number in range(11)]


def laid_out(model: str, layout: str, compute: str = "fp64") -> ParallelModel:
    at = Layout.parse(layout)
    transforms: list[Any] = [FullyShard(), TensorParallel(), ExpertParallel(), ContextParallel()]
    plan = Plan.of(transforms, at, piped("1f1b")) if at.pp > 1 else Plan.of(transforms, at)
    return realize(Blueprint.of(MODELS[model].build), plan, Topology.of(at, torch.device("cpu")), 3, compute, compute)


def stored(folder: str, model: str, layout: str, compute: str = "fp64", stop: int = 0, **options: Any) -> str:
    """Captures on this rank; what it was refused with."""
    with torch.device("meta"):
        whole = MODELS[model].build()

    def report(done: int) -> None:
        turns.append(done)
        if len(turns) == stop:
            raise KeyboardInterrupt

    turns: list[int] = []
    given = {"batch": 2, "shard_bytes": SHARD, "weights": "drawn"} | options
    rows = given.pop("rows", None) or inputs()
    try:
        record_sharded(laid_out(model, layout, compute), whole, rows, Path(folder), report=report, **given)
    except InterpError as refusal:
        return str(refusal)
    except KeyboardInterrupt:
        return "killed"
    return f"{len(turns)} turns"


def alone(folder: Path, model: str, compute: str = "fp64", **options: Any) -> ActivationStore:
    """What one process stores."""
    record(laid_out(model, "1", compute).part, inputs(), folder, batch=2, **options)
    return ActivationStore(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


CASES = [
    *(("dense", layout, "all") for layout in ("dp2", "tp2", "cp2", "pp2", "hsdp2x2", "dp2tp2", "pp2tp2")),
    *(("experts", layout, "all") for layout in ("dp2ep2", "pp2dp2ep2")),
    *(("dense", layout, selection) for layout in ("tp2", "cp2", "pp2dp2") for selection in ("last", "mean", "listed")),
]


@pytest.mark.parametrize(("model", "layout", "selection"), fast(CASES[0], CASES[-1], CASES[-5], of=CASES))
def test_ranks_store_what_one_process_does(world: World, tmp_path: Path, model: str, layout: str, selection: str) -> None:
    options = SELECTIONS[selection]
    one = alone(tmp_path / "one", model, **options)
    size = Layout.parse(layout).world
    said = world.run(stored, size, str(tmp_path / "several"), model, layout, **options)
    assert len(set(said)) == 1
    assert said[0].endswith("turns"), said[0]
    several = ActivationStore(tmp_path / "several")
    several.verify()
    writers = {shard["file"].split("-")[1] for shard in several.manifest["shards"]}
    assert writers == {f"{rank:05d}" for rank in range(size)}
    assert several.names == one.names
    assert several.manifest["taps"] == one.manifest["taps"]
    facts = several.manifest["facts"]
    assert facts == one.manifest["facts"] | {"weights": "drawn", "layout": str(Layout.parse(layout))}
    for name in ("input", "position", "token"):
        assert torch.equal(several.read(name), one.read(name)), name
    for name in one.names:
        torch.testing.assert_close(several.read(name), one.read(name), rtol=1e-10, atol=1e-12)
        assert torch.equal(several.read(name, 3, 9), several.read(name)[3:9])


def test_ranks_without_an_input_run_along(world: World, tmp_path: Path) -> None:
    options: dict[str, Any] = {"names": "blocks.*.residual_after", "rows": inputs()[:1]}
    assert world.run(stored, 2, str(tmp_path / "two"), "dense", "dp2", **options) == ["1 turns"] * 2
    found = ActivationStore(tmp_path / "two")
    assert [shard["file"] for shard in found.manifest["shards"]] == ["shard-00001-00000.safetensors"]
    expected = alone(tmp_path / "one", "dense", names=options["names"]).read("blocks.1.residual_after", 0, 5)
    torch.testing.assert_close(found.read("blocks.1.residual_after"), expected, rtol=1e-10, atol=1e-12)


def test_numbers_of_bf16_stay_so(world: World, tmp_path: Path) -> None:
    options: dict[str, Any] = {"names": "blocks.1.residual_after", "compute": "bf16"}
    one = alone(tmp_path / "one", "dense", **options)
    world.run(stored, 2, str(tmp_path / "two"), "dense", "tp2", **options)
    found = ActivationStore(tmp_path / "two")
    assert found.manifest["taps"] == one.manifest["taps"]
    assert found.read("blocks.1.residual_after").dtype == torch.bfloat16
    torch.testing.assert_close(found.read("blocks.1.residual_after"), one.read("blocks.1.residual_after"), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("layout", "turns"), fast(("tp2", 6), of=[("dp2", 3), ("tp2", 6)]))
def test_a_capture_that_is_killed_goes_on_to_the_same_files(world: World, tmp_path: Path, layout: str, turns: int) -> None:
    options = SELECTIONS["all"] | {"shard_bytes": SHARD // 4}
    assert world.run(stored, 2, str(tmp_path / "whole"), "dense", layout, **options) == [f"{turns} turns"] * 2
    cut = tmp_path / "cut"
    assert world.run(stored, 2, str(cut), "dense", layout, stop=1 + turns // 2, **options) == ["killed"] * 2
    (cut / ".shard-00001-00007.safetensors.partial").write_bytes(b"half")
    (cut / "shard-00001-00009.safetensors").write_bytes(b"not named")
    with pytest.raises(InterpError, match=r"the capture stopped with \d inputs stored"):
        ActivationStore(cut)
    kept = ActivationStore(cut, partial=True)
    assert 0 < kept.rows < sum(map(len, inputs()))
    kept.verify()
    world.run(stored, 2, str(cut), "dense", layout, stop=1, **options)
    said = world.run(stored, 2, str(cut), "dense", layout, **options)
    assert said[0].endswith("turns")
    assert int(said[0].split()[0]) < turns  # what was stored is not run again
    assert files(cut) == files(tmp_path / "whole")


def with_a_full_disk(folder: str, rank: int, **options: Any) -> str:
    """One rank's files may not grow beyond a few KiB."""
    import torch.distributed as dist

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 1024, before[1]))
    try:
        return stored(folder, "dense", "dp2", **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_for_one_rank_stops_all_with_its_message(world: World, tmp_path: Path) -> None:
    options = SELECTIONS["all"] | {"shard_bytes": 64 * 1024}
    world.run(stored, 2, str(tmp_path / "whole"), "dense", "dp2", **options)
    said = world.run(with_a_full_disk, 2, str(tmp_path / "cut"), 1, **options)
    assert said[0] == said[1]
    assert "shard-00001-00000.safetensors of" in said[0]
    assert "cannot be written" in said[0]
    assert "the first 0 inputs from number 5 on are stored: make room, and start the same capture again" in said[0]
    assert not list((tmp_path / "cut").glob("*partial"))
    assert world.run(stored, 2, str(tmp_path / "cut"), "dense", "dp2", **options)[0].endswith("turns")
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_memory_is_bounded_by_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    flush = ranks_store.ShardWriter.flush
    monkeypatch.setattr(ranks_store.ShardWriter, "flush", lambda self: (sizes.append(self._bytes), flush(self))[1])
    stored(str(tmp_path / "one"), "dense", "1", names="norm", shard_bytes=4000)
    assert len(sizes) > 3
    assert max(sizes) <= 4000


def test_a_store_without_some_input_is_not_complete(tmp_path: Path) -> None:
    taps = {"norm": {"alias": "", "shape": [], "dtype": "float32"}}
    store = ranks_store.RanksStore(tmp_path / "x", {}, taps, SHARD, SingleProcessWorld(), 3)
    store.add({"norm": torch.zeros(1)}, {name: torch.zeros(1).long() for name in ("input", "position", "token")}, 1)
    store.agree(0, 3)
    with pytest.raises(InterpError, match="the values of input 1 were not stored"):
        store.close()
    with pytest.raises(InterpError, match="the capture stopped with 1 inputs stored"):
        ActivationStore(tmp_path / "x")


def with_other_shares(folder: str, rank: int) -> str:
    """One rank's values are twice there, as a fault in a layout would have it."""
    import torch.distributed as dist

    if dist.get_rank() != rank:
        return stored(folder, "dense", "dp2", names="norm")
    before = ranks.pack
    ranks.pack = lambda pieces: before([*pieces, *pieces])
    try:
        return stored(folder, "dense", "dp2", names="norm")
    finally:
        ranks.pack = before


def test_values_that_do_not_come_together_on_one_rank_stop_all(world: World, tmp_path: Path) -> None:
    for said in world.run(with_other_shares, 2, str(tmp_path / "x"), 1):
        assert said.startswith("norm: a share is missing, or two ranks sent the same one")


def test_a_store_whose_manifest_could_not_be_written_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taps = {"norm": {"alias": "", "shape": [], "dtype": "float32"}}
    store = ranks_store.RanksStore(tmp_path / "x", {}, taps, SHARD, SingleProcessWorld(), 1)
    store.add({"norm": torch.zeros(1)}, {name: torch.zeros(1).long() for name in ("input", "position", "token")}, 1)
    store.agree(0, 1)
    full, write = [True], ranks_store.ActivationManifest.write

    def fails_once(self: Any, complete: bool = False) -> None:
        if full.pop() if full else False:
            raise InterpError("manifest.json cannot be written")
        write(self, complete)

    monkeypatch.setattr(ranks_store.ActivationManifest, "write", fails_once)
    with pytest.raises(InterpError, match=r"manifest\.json cannot be written"):
        store.close()
    with pytest.raises(InterpError, match="the capture stopped with 0 inputs stored"):
        ActivationStore(tmp_path / "x")


def test_what_cannot_be_stored_is_refused_on_all_ranks(world: World, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    refused = {
        "logits is not computed on several ranks": ("empty", {"names": ["logits", "norm"]}),
        f"{tmp_path / 'other'} is not empty and not a store": ("other", {"names": "norm"}),
        f"{tmp_path / 'other/file/x'} cannot be written: Not a directory": ("other/file/x", {"names": "norm"}),
    }
    for start, (folder, options) in refused.items():
        for message in world.run(stored, 2, str(tmp_path / folder), "dense", "dp2", **options):
            assert message.startswith(start)
    assert not (tmp_path / "empty").exists()
    world.run(stored, 2, str(tmp_path / "done"), "dense", "dp2", names="norm")
    for layout, start in (("dp2", "is complete already"), ("tp2", "facts.layout is dp2, here tp2")):
        for message in world.run(stored, 2, str(tmp_path / "done"), "dense", layout, names="norm"):
            assert start in message


def test_a_row_that_a_layout_would_make_too_long_is_refused(tmp_path: Path) -> None:
    odd = replace(DENSE, max_length=15)
    with torch.device("meta"):
        whole = odd.build()
    model = laid_out("dense", "1")
    with pytest.raises(InterpError, match="an input has 15 tokens, which layout 1 pads to 16, more than max_length 15"):
        record_sharded(model, whole, [torch.zeros(15, dtype=torch.int64)], tmp_path / "x", "norm", weights="")
    assert not (tmp_path / "x").exists()


def probed(trained: str, folder: str, layout: list[str]) -> str:
    """The command on this rank, as a launcher starts it."""
    place = Path(trained)
    selection = {"names": ["blocks.*.residual_after"], "layers": None, "heads": None, "positions": "all"}
    source = {"file": place / "text.txt", "lines": False, "length": 16, "limit": None, "tokenizer": None}
    limits: dict[str, Any] = {"budget": 1.0, "batch": 2}
    asked = CaptureRequest(place / "run", "model", selection, source, Path(folder), limits, layout)
    return str(asked.store(read_launcher(os.environ), Registry(), lambda _: None))


@pytest.mark.parametrize("layout", fast("pp2", of=["dp2", "tp2", "pp2"]))
def test_the_command_stores_on_ranks_what_it_does_on_one_process(
    world: World, trained: Path, tmp_path: Path, layout: str
) -> None:
    overrides = [] if layout == "dp2" else [f"--parallel.{layout[:2]}=2"]
    one = probed(str(trained), str(tmp_path / "one"), [])
    several = world.run(probed, 2, str(trained), str(tmp_path / "two"), overrides, group=False)
    assert several == [one.replace("/one'", "/two'")] * 2
    expected, found = ActivationStore(tmp_path / "one"), ActivationStore(tmp_path / "two")
    facts = expected.manifest["facts"]
    assert found.manifest["facts"] == facts | {"layout": layout}, "the weights have the same fingerprint"
    assert found.names == expected.names
    for name in (*expected.names, "input", "position", "token"):
        torch.testing.assert_close(found.read(name), expected.read(name), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_under_torchrun_one_process_speaks(trained: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "forge_train"]
    given = ["probe", str(trained / "run"), "--names", "norm", "--text", str(trained / "text.txt"), "--length", "16"]
    more = ["--output", str(tmp_path / "acts"), "--export", str(tmp_path / "acts.npz"), "--parallel.tp=2", "--json"]
    done = subprocess.run([*launcher, *given, *more], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["names"] == ["norm"]
    assert (tmp_path / "acts.npz").is_file()
    assert ActivationStore(tmp_path / "acts").rows == len((trained / "text.txt").read_text())
    again = subprocess.run([*launcher, *given, *more], capture_output=True, text=True, check=False, timeout=300)
    assert again.returncode == 1, "torchrun's own"
    assert (again.stdout + again.stderr).count("is complete already; read it") == 1
