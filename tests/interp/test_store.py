"""What is stored is what was captured; a capture that is killed, or meets a full disk, goes on to the same files."""

import json
import resource
import sys

import h5py
import numpy as np
import pytest
import torch
import xarray
from pyarrow import parquet

from forge_interp import export as conversion
from forge_interp.captures import capture
from forge_interp.export import as_xarray, convert
from forge_interp.store import MANIFEST, ActivationStore, ShardWriter, fingerprint, record
from forge_interp.tap_names import InterpError

NAMES = ("blocks.1.residual", "blocks.0.attention.k")
ROW = 32 * 4 + 2 * 8 * 4 + 3 * 8
"""Bytes of a row of both, with its index, in fp32."""


@pytest.fixture
def inputs(tokens):
    rows = tokens(11, 8)
    return [row[: 8 - number % 3] for number, row in enumerate(rows)]


def kept(model, inputs, folder, **options):
    return record(model, inputs, folder, NAMES, **{"batch": 2, "shard_bytes": 34 * ROW} | options)


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_each_input_alone(make, inputs, tmp_path, dtype):
    model = make(spread=5.0, dtype=dtype)
    kept(model, inputs, tmp_path / "store")
    store = ActivationStore(tmp_path / "store")
    assert store.names == tuple(sorted(NAMES))
    assert store.rows == sum(map(len, inputs))
    assert len(store.manifest["shards"]) >= 2
    store.verify()
    start = 0
    for number, row in enumerate(inputs):
        stop = start + len(row)
        with torch.no_grad(), capture(model, NAMES) as seen:
            model(row[None])
        for name in NAMES:
            found = store.read(name, start, stop)
            assert found.dtype == dtype
            torch.testing.assert_close(found, seen[name][0], rtol=1e-5 if dtype == torch.float32 else 0.05, atol=1e-4)
        assert store.read("input", start, stop).tolist() == [number] * len(row)
        assert store.read("position", start, stop).tolist() == list(range(len(row)))
        assert torch.equal(store.read("token", start, stop), row)
        start = stop
    for name in NAMES:
        assert torch.equal(torch.cat(list(store.parts(name))), store.read(name))
    assert torch.equal(store.read("blocks.1.hook_resid_pre"), store.read("blocks.1.residual"))
    facts = store.manifest["facts"]
    assert (facts["weights"], facts["inputs"], facts["positions"]) == (fingerprint(model), 11, "all")
    with torch.no_grad():
        model.head.weight[3, 3] += 1
    assert fingerprint(model) != facts["weights"]


def test_selected_positions_heads_and_means(make, inputs, tmp_path):
    model = make(spread=5.0)
    record(model, inputs, tmp_path / "last", "attention.heads", layers=[1], heads=[2], positions="last", batch=3)
    record(model, inputs, tmp_path / "mean", "norm", positions="mean", batch=3)
    last, mean = ActivationStore(tmp_path / "last"), ActivationStore(tmp_path / "mean")
    assert last.read("position").tolist() == [len(row) - 1 for row in inputs]
    assert mean.read("position").tolist() == [-1] * 11
    for number, row in enumerate(inputs):
        with torch.no_grad(), capture(model, ["blocks.1.attention.heads", "norm"]) as seen:
            model(row[None])
        torch.testing.assert_close(
            last.read("blocks.1.attention.heads", number, number + 1), seen["blocks.1.attention.heads"][:, -1, 2:3]
        )
        torch.testing.assert_close(mean.read("norm", number, number + 1)[0], seen["norm"][0].mean(0))


@pytest.mark.parametrize("killed", [1, 3, 5])
def test_a_capture_that_is_killed_goes_on_to_the_same_files(make, inputs, tmp_path, killed):
    model = make(spread=5.0)
    kept(model, inputs, tmp_path / "whole")

    class Killed(BaseException):
        pass

    def stop(done):
        if done >= 2 * killed:
            raise Killed

    with pytest.raises(Killed):
        kept(model, inputs, tmp_path / "cut", report=stop)
    (tmp_path / "cut" / ".shard-00007.safetensors.partial").write_bytes(b"half")
    (tmp_path / "cut" / f".{MANIFEST}.4711").write_bytes(b"half")
    with pytest.raises(InterpError, match=r"the capture stopped with \d inputs stored"):
        ActivationStore(tmp_path / "cut")
    begun = []
    kept(model, inputs, tmp_path / "cut", report=begun.append)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert killed < 3 or begun[0] > 2  # what was stored is not run again


def test_a_capture_that_was_killed_before_its_first_manifest_can_be_started_again(make, inputs, tmp_path):
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / f".{MANIFEST}.4711").write_bytes(b"half")
    kept(make(), inputs, tmp_path / "cut")
    kept(make(), inputs, tmp_path / "whole")
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_disk_that_takes_no_more_stops_with_a_message_and_can_be_gone_on_from(make, inputs, tmp_path):
    model = make(spread=5.0)
    kept(model, inputs, tmp_path / "whole")
    largest = max(len(content) for content in files(tmp_path / "whole").values())
    kept_before = resource.getrlimit(resource.RLIMIT_FSIZE)
    small = {"shard_bytes": 34 * ROW}

    def fill(done):
        if done == 6:  # files may not grow beyond half a shard from here on
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, kept_before[1]))

    try:
        with pytest.raises(InterpError, match=r"cannot be written: .*the first \d inputs are stored: make room"):
            kept(model, inputs, tmp_path / "cut", report=fill, **small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept_before)
    assert not list((tmp_path / "cut").glob("*partial"))
    kept(model, inputs, tmp_path / "cut")
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_memory_is_bounded_by_a_shard(make, inputs, tmp_path, monkeypatch):
    sizes, flush = [], ShardWriter.flush
    monkeypatch.setattr(ShardWriter, "flush", lambda self: (sizes.append(self._bytes), flush(self))[1])
    kept(make(), inputs, tmp_path / "store")
    assert max(sizes) <= 34 * ROW
    assert sum(sizes) == sum(map(len, inputs)) * ROW


def test_another_capture_is_not_mixed_in(make, inputs, tmp_path):
    model = make()
    kept(model, inputs, tmp_path / "store")
    with pytest.raises(InterpError, match="is complete already"):
        kept(model, inputs, tmp_path / "store")
    (tmp_path / "store" / MANIFEST).write_text((tmp_path / "store" / MANIFEST).read_text().replace("true", "false"))
    for options, difference in (({"batch": 3}, "facts.batch is 2, here 3"), ({"shard_bytes": 10**6}, "shard_bytes is")):
        with pytest.raises(InterpError, match=f"holds another capture: {difference}"):
            kept(model, inputs, tmp_path / "store", **options)
    with pytest.raises(InterpError, match=r"facts.weights"):
        kept(make(seed=5), inputs, tmp_path / "store")
    with pytest.raises(InterpError, match=r"facts.tokens"):
        kept(model, [row.flip(0) for row in inputs], tmp_path / "store")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(InterpError, match="not empty and not a store"):
        kept(model, inputs, tmp_path / "other")
    with pytest.raises(InterpError, match="cannot be written: Not a directory; choose another folder"):
        kept(model, inputs, tmp_path / "other" / "file" / "store")


def test_damage_and_wrong_questions_are_named(make, inputs, tmp_path):
    kept(make(), inputs, tmp_path / "store")
    store = ActivationStore(tmp_path / "store")
    with pytest.raises(InterpError, match=r"norm was not captured; .* holds blocks.0.attention.k, blocks.1.residual, input"):
        store.read("norm")
    with pytest.raises(InterpError, match="rows 3 to 1000 of input do not exist"):
        store.read("input", 3, 1000)
    assert store.read(NAMES[1], 4, 4).shape == (0, 2, 8)
    shard = tmp_path / "store" / "shard-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(InterpError, match=r"shard-00001.safetensors is damaged"):
        store.verify()
    shard.unlink()
    with pytest.raises(InterpError, match=r"lacks shard-00001"):
        ActivationStore(tmp_path / "store")
    with pytest.raises(InterpError, match="cannot be read"):
        ActivationStore(tmp_path)
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(InterpError, match="is not a manifest of activations"):
        ActivationStore(tmp_path)


def test_inputs_are_looked_at_before_the_first_forward(make, inputs, tmp_path):
    model = make()
    for wrong, match, options in (
        ([], "inputs is empty", {}),
        ([torch.tensor([], dtype=torch.int64)], "input 0 has 0 tokens", {}),
        ([torch.zeros(65, dtype=torch.int64)], "input 0 has 65 tokens; 1 to 64", {}),
        ([torch.tensor([97])], "input 0 holds token 97; the vocabulary has 97", {}),
        (inputs, "position 6 is beyond input 2, of 6 tokens", {"positions": [0, 6]}),
        (inputs, "need words of each batch", {"positions": "last_of_word"}),
    ):
        with pytest.raises(InterpError, match=match):
            record(model, wrong, tmp_path / "store", "norm", **options)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_formats_hold_the_same_numbers(make, inputs, tmp_path, dtype):
    kept(make(dtype=dtype), inputs, tmp_path / "store")
    store = ActivationStore(tmp_path / "store")
    for suffix in conversion.CONVERTERS:
        convert(store, tmp_path / f"found{suffix}")
    with np.load(tmp_path / "found.npz", allow_pickle=False) as archive:
        arrays = dict(archive)
    table = parquet.read_table(tmp_path / "found.parquet")
    in_memory, opened = as_xarray(store), xarray.open_zarr(tmp_path / "found.zarr", consolidated=False)
    hdf5 = h5py.File(tmp_path / "found.h5")
    assert json.loads(hdf5.attrs["facts"]) == store.manifest["facts"] == opened.attrs["facts"]
    for name in (*store.names, "input", "position", "token"):
        expected = store.read(name)
        expected = expected.float() if dtype == torch.bfloat16 and name in store.names else expected
        for found in (arrays[name], hdf5[name][()], opened[name].values, in_memory[name].values):
            assert found.dtype == expected.numpy().dtype
            assert np.array_equal(found, expected.numpy())
        assert np.array_equal(np.array(table[name].to_pylist()).reshape(expected.shape), expected.numpy())
    with pytest.raises(InterpError, match=r"found.csv: activations can be written as .npz, .parquet, .h5, .zarr files"):
        convert(store, tmp_path / "found.csv")


def test_a_converter_without_its_library_or_place_says_so(make, inputs, tmp_path, monkeypatch):
    kept(make(), inputs, tmp_path / "store")
    store = ActivationStore(tmp_path / "store")
    assert set(as_xarray(store, ["blocks.1.hook_resid_pre"]).data_vars) == {"blocks.1.hook_resid_pre"}
    with pytest.raises(InterpError, match="cannot be written"):
        convert(store, tmp_path / "no" / "found.h5")
    for library, suffix in (("h5py", ".h5"), ("zarr", ".zarr"), ("pyarrow", ".parquet")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(InterpError, match=rf"{suffix} files need {library}: pip install 'forge-interp\[neuro\]'"):
            convert(store, tmp_path / f"x{suffix}")
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(InterpError, match="a data set of xarray need"):
        as_xarray(store)
