"""Rules across sections: refused before torch is imported, with the keys that mend it."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.layout import Layout
from forge_parallel.checks import axes_are_claimed, batch_fits, compositions_are_proven, features
from forge_parallel.components.transforms import Shard
from forge_parallel.proven import FEATURES, unproven


def job(global_batch: int = 8, micro_batch: int = 2, compute: str = "fp32", **transforms: Any) -> SimpleNamespace:
    return SimpleNamespace(
        train=SimpleNamespace(global_batch=global_batch, micro_batch=micro_batch),
        precision=SimpleNamespace(compute=compute, state="fp32"),
        transforms=transforms,
    )


def test_a_batch_that_fits_has_no_fault() -> None:
    assert list(batch_fits(job(), Layout(dp_shard=4))) == []


@pytest.mark.parametrize(
    ("rows", "micro", "layout", "key", "legal"),
    [(8, 2, "dp3", "train.global_batch", "1, 2, 4, 8"), (12, 4, "dp2", "train.micro_batch", "1, 2, 3, 6")],
)
def test_a_batch_that_does_not_fit_names_what_would(rows: int, micro: int, layout: str, key: str, legal: str) -> None:
    (fault,) = batch_fits(job(rows, micro), Layout.parse(layout))
    assert fault.key == key
    assert fault.hint.endswith(legal)


def test_an_axis_that_nobody_implements_is_a_fault() -> None:
    found = {fault.key: str(fault) for fault in axes_are_claimed(job(), Layout.parse("pp2dp2tp2cp2"))}
    assert sorted(found) == ["parallel.cp", "parallel.pp", "parallel.tp"]
    assert "'tensor'" in found["parallel.tp"]
    assert list(axes_are_claimed(job(tensor=object()), Layout.parse("tp2"))) == [], "a plugin may offer it"


def test_features_of_a_job() -> None:
    assert features(job(8, 2), Layout.parse("hsdp2x2")) == {"dp_shard", "dp_replicate"}
    assert features(job(8, 2, "bf16", shard=Shard(reduce="each")), Layout()) == {"accumulate", "bf16", "reduce_each"}
    assert features(job(compute="bf16", mine=object()), Layout.parse("dp4")) == {"dp_shard", "bf16", "mine"}


def test_what_no_test_proves_is_refused_by_name() -> None:
    assert unproven(FEATURES) == []
    assert unproven(["dp_shard", "mine"]) == [("mine",)]
    (fault,) = compositions_are_proven(job(mine=object()), Layout.parse("dp4"))
    assert "transforms.mine" in str(fault)
    assert list(compositions_are_proven(job(compute="bf16"), Layout.parse("hsdp2x2"))) == []


def test_checks_import_no_torch() -> None:
    code = "import sys, forge_parallel.checks, forge_parallel.plan, forge_parallel.launcher; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
