"""Distributed checkpoints and torch files: torch reads what is written; what others wrote is unpickled on request only."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from forge_core.errors import ForgeError
from forge_testing.modules import InMemory, small
from forge_train.formats.forge import ForgeConverter
from forge_train.formats.torch_files import METADATA, SIDECAR, DcpConverter, TorchConverter
from harness.siblings import fast
from models.hf.command_line import run
from train.formats.test_plain import RECIPE, alike, tensors

LOADS = """
import sys
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

flat, nested, wanted = sys.argv[1:]
wanted = load_file(wanted)
for path in (flat, nested):
    state = {name: torch.full_like(tensor, 7) for name, tensor in wanted.items()}
    dcp.load({"model": state} if path == nested else state, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(state[name].view(torch.uint8), wanted[name].view(torch.uint8)) for name in wanted)
assert not [name for name in sys.modules if name.startswith("forge")]
print(len(wanted), "equal")
"""


class Payload:
    """Writes which process unpickled it."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return os.system, (f"echo $PPID > {self.sentinel}",)


@pytest.fixture
def given() -> InMemory:
    return small()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def of_dcp(prefix: str = "", recipe: Path | None = None, unsafe: bool = False, names: str = "forge") -> DcpConverter:
    return DcpConverter(recipe=recipe and str(recipe), prefix=prefix, names=names, unsafe_pickle=unsafe)


def of_torch(prefix: str = "", recipe: Path | None = None, unsafe: bool = False) -> TorchConverter:
    return TorchConverter(recipe=recipe and str(recipe), prefix=prefix, names="forge", unsafe_pickle=unsafe)


BOTH = pytest.mark.parametrize("converter", [of_dcp, of_torch], ids=["dcp", "torch"])


def theirs(kind: str, path: Path, state: dict[str, Any]) -> Path:
    """What torch writes without Forge."""
    if kind == "torch":
        torch.save(state, path)
    else:
        with catch_warnings(action="ignore", category=UserWarning):
            dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def test_torch_loads_a_distributed_checkpoint_without_forge(given: InMemory, tmp_path: Path) -> None:
    ForgeConverter().write(tmp_path / "forge", given)
    command = ["convert", "--from", "forge", "--to", "dcp", "--dtype", "bf16", tmp_path / "forge"]
    assert run(*command, tmp_path / "flat") == 0
    assert run(*command, tmp_path / "nested", "--to-prefix", "model.") == 0
    save_file({name: tensor.bfloat16() for name, tensor in tensors(given).items()}, tmp_path / "wanted.safetensors")
    child = [sys.executable, "-I", "-c", LOADS, tmp_path / "flat", tmp_path / "nested", tmp_path / "wanted.safetensors"]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == f"{len(given.tensors)} equal\n", done.stderr
    for folder in ("flat", "nested"):  # by its bytes, whose names have no prefix
        found = of_dcp().read(tmp_path / folder)
        assert alike(tensors(found), {name: tensor.bfloat16() for name, tensor in tensors(given).items()})


def test_torch_loads_a_torch_file(given: InMemory, tmp_path: Path) -> None:
    of_torch("net.").write(tmp_path / "out", given)
    state = torch.load(tmp_path / "out/model.pt", weights_only=True)
    assert alike({name.removeprefix("net."): tensor for name, tensor in state.items()}, tensors(given))


@BOTH
def test_fault_45_what_forge_wrote_is_read_without_unpickling(
    given: InMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converter: Any
) -> None:
    converter().write(tmp_path / "out", given)

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"), (subprocess, "run")):
        monkeypatch.setattr(owner, name, refused)
    found = converter().read(tmp_path / "out")
    assert alike(tensors(found), tensors(given)) and found.facts.step == 7


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_fault_45_and_49_nothing_of_another_is_unpickled_unasked(
    given: InMemory, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    sentinel, path = tmp_path / "sentinel", tmp_path / "theirs"
    state = {"model": dict(tensors(given)), "step": 3}
    theirs(kind, path, state)
    if kind == "dcp":  # a payload that runs before anything else
        (path / METADATA).write_bytes(pickle.dumps(Payload(sentinel)))
    else:
        torch.save(state | {"args": Payload(sentinel)}, path)
    command = ["convert", "--from", kind, "--to", "safetensors", path, tmp_path / "out", "--recipe", recipe, "--prefix", "model."]
    assert run(*command) == 2
    assert "can run any code of its author" in capsys.readouterr().err
    assert not sentinel.exists() and not (tmp_path / "out").exists()
    code = run(*command, "--unsafe-pickle")
    assert sentinel.exists() and int(sentinel.read_text()) != os.getpid(), "in another process"
    assert code == (2 if kind == "dcp" else 0), "the payload took the place of what torch needs"


@pytest.mark.parametrize(
    "trust", [pytest.param([], id="unasked"), pytest.param(["--unsafe-pickle"], id="trusted", marks=pytest.mark.slow)]
)
def test_paths_that_python_3_13_pickled_are_read(given: InMemory, recipe: Path, tmp_path: Path, trust: list[str]) -> None:
    path = theirs("dcp", tmp_path / "theirs", dict(tensors(given)))
    described = pickle.loads((path / METADATA).read_bytes())  # noqa: S301
    described.storage_meta.checkpoint_id = path
    older = pickle.dumps(described, protocol=2)  # has names in full
    newer = older.replace(b"cpathlib\n", b"cpathlib._local\n")
    assert b"cpathlib._local\nPosixPath" in newer
    (path / METADATA).write_bytes(newer)
    command = ["convert", "--from", "dcp", "--to", "forge", path, tmp_path / "out", "--recipe", recipe]
    assert run(*command, *trust) == 0
    assert alike(tensors(ForgeConverter().read(tmp_path / "out")), tensors(given))


@pytest.mark.parametrize("kind", fast("dcp", of=["dcp", "torch"]))
def test_on_request_the_tensors_of_others_are_read(
    given: InMemory, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    state = {"model": dict(tensors(given)), "optimizer": {"m": torch.ones(2)}, "lr": 0.1}
    path = theirs(kind, tmp_path / "theirs", state)
    command = ["convert", "--from", kind, "--to", "forge", path, tmp_path / "out", "--recipe", recipe]
    assert run(*command, "--prefix", "model.", "--unsafe-pickle") == 0
    assert "1 tensors whose names do not begin with 'model.' were left out" in capsys.readouterr().out
    assert alike(tensors(ForgeConverter().read(tmp_path / "out")), tensors(given))
    if kind == "dcp":
        return
    assert run(*command[:6], tmp_path / "other", *command[7:], "--unsafe-pickle") == 2
    said = capsys.readouterr().err
    assert (
        "do not fit the model" in said
        and "model.embed.weight: not in the model" in said
        and "embed.weight: missing" in said
        and str(path) in said
    )


@pytest.mark.parametrize("converter", fast(of_torch, of=[of_dcp, of_torch]))
def test_what_cannot_be_unpickled_is_refused(recipe: Path, tmp_path: Path, converter: Any) -> None:
    path = tmp_path / "broken"
    if converter is of_dcp:
        path.mkdir()
        (path / METADATA).write_bytes(b"no pickle")
    else:
        path.write_bytes(b"no pickle")
    with pytest.raises(ForgeError, match="could not be unpickled"):
        converter(recipe=recipe, unsafe=True).read(path)
    with pytest.raises(ForgeError, match="is missing"):
        converter(unsafe=True).read(tmp_path / "nowhere")


@BOTH
def test_fault_5_bytes_that_changed_are_not_read(given: InMemory, tmp_path: Path, converter: Any) -> None:
    folder = tmp_path / "out"
    converter().write(folder, given)
    content = json.loads((folder / SIDECAR).read_text())
    name, entry = next(iter(content["tensors"].items()))
    file = folder / entry["file"]
    data = bytearray(file.read_bytes())
    data[entry["start"] + 5] ^= 1
    file.write_bytes(data)
    if converter is of_torch:  # the whole file is known by its digest
        with pytest.raises(ForgeError, match="pass --unsafe-pickle"):
            converter().read(folder)
        return
    with pytest.raises(ForgeError, match="have changed since they were written"):
        converter().read(folder).read([name])
    marker = folder / METADATA
    marker.write_bytes(marker.read_bytes() + b"x")
    with pytest.raises(ForgeError, match="pass --unsafe-pickle"):
        converter().read(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../outside"},
        {"file": "/etc/passwd"},
        {"file": "link"},
        {"file": "nowhere"},
        {"start": -1},
        {"start": 10**12},
        {"shape": [10**9, 10**9]},
        {"shape": [-1, 4]},
        {"shape": "x"},
        {"dtype": "save"},
        {"more": 1},
    ],
    ids=str,
)
def test_fault_46_a_table_that_leads_elsewhere_is_not_followed(given: InMemory, tmp_path: Path, change: dict[str, Any]) -> None:
    folder = tmp_path / "out"
    of_dcp().write(folder, given)
    (tmp_path / "outside").write_bytes(bytes(10_000))
    (folder / "link").symlink_to(tmp_path / "outside")
    content = json.loads((folder / SIDECAR).read_text())
    next(iter(content["tensors"].values())).update(change)
    (folder / SIDECAR).write_text(json.dumps(content))
    with pytest.raises(ForgeError, match="pass --unsafe-pickle"):
        of_dcp().read(folder)


def test_options_of_other_formats_are_refused(given: InMemory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ForgeConverter().write(tmp_path / "forge", given)
    for option in (["--unsafe-pickle"], ["--prefix", "x"], ["--recipe", "debug"]):
        assert run("convert", "--from", "forge", "--to", "dcp", tmp_path / "forge", tmp_path / "out", *option) == 2
        assert f"format 'forge' does not support {option[0]}" in capsys.readouterr().err
