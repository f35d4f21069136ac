"""Receipts: what a plugin brings is refused in a layout until somebody has measured it there, and again when code changes."""

import json
import sys
from pathlib import Path

import pytest

from forge_core.errors import ConfigError, ForgeError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_parallel.checks import compositions_are_proven
from forge_parallel.verify import proofs
from forge_train.recipe.load import load_recipe
from harness import commands

PLUGIN = '''
"""A feed-forward part of somebody else."""

from dataclasses import dataclass

from forge_core.component import Component


@dataclass(frozen=True, kw_only=True)
class Squared(Component):
    """ReLU, squared."""

    activation = "relu2"
    gated = False

    def build(self, context):
        from forge_models.components.layers import ReLU2

        return ReLU2().build(context)
'''


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    (tmp_path / "mine.py").write_text(PLUGIN)
    small = ["--model.layers=2", "--train.global_batch=8", "--train.micro_batch=1", "--precision.compute=fp32", "--hooks=[]"]
    return [*small, f"--model.mlp.name='{tmp_path / 'mine.py'}:Squared'", "--parallel.dp_shard=2"]


def refused(keys: list[str]) -> str:
    with pytest.raises(ConfigError) as refusal:
        load_recipe("debug", keys, 2, Registry())
    return str(refusal.value)


def test_a_part_of_a_plugin_is_refused_in_a_layout_until_a_receipt_shows_it(keys: list[str], tmp_path: Path) -> None:
    assert load_recipe("debug", keys[:-1], 1, Registry()), "on one process there is nothing to prove"
    message = refused(keys)
    assert "model.mlp of mine.py" in message and "--layouts dp2 --record DIR" in message
    folder = tmp_path / "proofs"
    measured = commands.run("-m", "forge_train", "parity", "debug", *keys[:-1], "--layouts", "dp2", "--record", str(folder))
    assert measured.returncode == 0, measured.stderr
    (file,) = folder.glob("*.json")
    (receipt,) = proofs.read(folder)
    assert receipt.layout == "dp2" and receipt.mode == "fp64"
    assert set(receipt.features) == {"dp_shard", "accumulate", "mine.py:Squared"}
    given = f"--parallel.proofs=['{folder}']"
    job = load_recipe("debug", [*keys, given], 2, Registry()).job
    assert list(compositions_are_proven(job, Layout.parse("dp2"))) == []
    with pytest.raises(ConfigError, match=r"model\.mlp of mine\.py.*parallel\.tp = 2|parallel\.tp = 2.*model\.mlp of mine\.py"):
        load_recipe("debug", [*keys[:-1], "--parallel.tp=2", given], 2, Registry())

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text(PLUGIN + "# another file of the same name")
    other = [key.replace(f"{tmp_path}/mine.py", f"{tmp_path}/other/mine.py") for key in keys]
    assert "receipts of other code of mine.py do not count" in refused([*other, given])

    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "errors": {**said["errors"], "gradients": 1e-3}, "tolerance": 1.0}))
    assert "model.mlp of mine.py" in refused([*keys, given]), "an error beyond the tolerance proves nothing"
    file.write_text(json.dumps({**said, "digests": {**said["digests"], "mine.py": "another"}}))
    assert "receipts of other code of mine.py do not count" in refused([*keys, given])
    file.write_text(json.dumps({**said, "digests": {**said["digests"], "forge_parallel": "another"}}))
    assert "receipts of other code of forge_parallel do not count" in refused([*keys, given])
    for package in said["digests"]:
        kept = {name: digest for name, digest in said["digests"].items() if name != package}
        file.write_text(json.dumps({**said, "digests": kept}))
        assert f"receipts of other code of {package} do not count" in refused([*keys, given])
    file.write_text("{}")
    assert "is not a receipt" in refused([*keys, given])


def test_a_receipt_proves_nothing_that_is_ours(keys: list[str], tmp_path: Path) -> None:
    """Only tests of this repository prove what is ours; a file cannot."""
    forged = proofs.Receipt(
        ("dp_shard", "offload", "tp", "tp_asynchronous"),
        "dp2",
        "fp64",
        1e-10,
        dict.fromkeys(("loss", "norm", "gradients", "weights"), 0.0),
        {},
        {},
    )
    proofs.write(forged, tmp_path / "forged")
    ours = [key for key in keys if "mlp" not in key] + ["--transforms.shard.offload=true"]
    assert "transforms.shard.offload = true" in refused([*ours, f"--parallel.proofs=['{tmp_path / 'forged'}']"])


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"nowhere of parallel\.proofs does not exist"):
        proofs.read(tmp_path / "nowhere")


def test_a_plugin_offers_its_receipts(tmp_path: Path) -> None:
    folder = tmp_path / "receipts"
    written = proofs.Receipt(("acme:Mixer", "tp"), "tp2", "fp64", 1e-10, {}, {}, {})
    proofs.write(written, folder)
    module = tmp_path / "acme_proofs.py"
    module.write_text(f"FOLDER = {str(folder)!r}\n")
    from forge_core.registry import Entry

    sys.path.insert(0, str(tmp_path))
    try:
        registry = Registry([Entry("forge.proofs", "acme", "acme", "1.0", "acme_proofs:FOLDER")])
        assert proofs.offered([], registry) == [written]
    finally:
        sys.path.remove(str(tmp_path))
