"""Layers whose weights torch's parametrizations compute: right in every number format, or refused by name."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel import parallelize
from forge_parallel.model.parallel_model import gathered
from harness.pool import World
from harness.siblings import fast
from parallel.foreign.test_loops import TOKENS, score
from parallel.foreign_modules import Plain

KINDS = ("spectral_norm", "weight_norm", "orthogonal")


def _built(kind: str) -> nn.Module:
    """A layer of each block has a parametrization."""
    module = Plain()
    for block in module.blocks:
        block.up = nn.Sequential(getattr(parametrizations, kind)(nn.Linear(8, 8)), block.up)
    return module


TWO = {"blocks.*.up.1": "colwise", "blocks.*.down": "rowwise"}


def _gradients(kind: str, layout: str) -> tuple[float, float, dict[str, Tensor], dict[str, Tensor]]:
    model = parallelize(partial(_built, kind), layout, tp_plan=TWO, state="fp64", compute="fp64")
    plain = _built(kind).double()
    plain.load_state_dict(model.state_dict(whole=True))
    rows = TOKENS.chunk(model.data_ranks)[model.data_rank]
    found = model.step([{"tokens": each} for each in rows.chunk(2)], lambda output, batch: score(output, batch["tokens"]))
    expected = 0.0
    shares = [share.chunk(2) for share in TOKENS.chunk(model.data_ranks)]
    for each in map(torch.cat, zip(*shares, strict=True)):  # as on the ranks: a forward changes the vectors of a spectral norm
        (loss := score(plain(each), each) / 2).backward()
        expected += loss.item()
    right = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    return float(found), expected, gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable()}), right


CASES = [(kind, layout) for kind in KINDS for layout in ("dp2", "tp2", "pp2", "dp2tp2")]


@pytest.mark.parametrize(
    ("kind", "layout"), fast(("spectral_norm", "dp2"), ("spectral_norm", "pp2"), ("orthogonal", "tp2"), of=CASES)
)
def test_parametrized_layers_have_the_gradients_of_one_process(world: World, kind: str, layout: str) -> None:
    for loss, expected, found, right in world.run(_gradients, Layout.parse(layout).world, kind, layout):
        assert loss == pytest.approx(expected, rel=1e-10)
        assert found.keys() == right.keys()
        for name, gradient in right.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-13, msg=lambda text, at=name: f"{at}: {text}")


def _refused(layout: str) -> list[str]:
    found = []
    for kind in KINDS:
        try:
            model = parallelize(partial(_built, kind), layout, tp_plan=TWO, compute="bf16")
            model.step([{"tokens": TOKENS[:2]}, {"tokens": TOKENS[2:]}], lambda out, batch: score(out.float(), batch["tokens"]))
            found.append("")
        except PlanError as refusal:
            found.append(str(refusal))
    return found


@pytest.mark.parametrize("layout", fast("dp2", "pp2", of=["dp2", "tp2", "pp2"]))
def test_parametrizations_that_bf16_cannot_compute_are_refused_by_name(world: World, layout: str) -> None:
    for spectral, weight, orthogonal in world.run(_refused, 2, layout):
        path = "blocks.0.up.0.parametrizations.weight.0"
        for refusal, kind in ((spectral, "_SpectralNorm"), (orthogonal, "_Orthogonal")):
            assert refusal.startswith(f"parallelize: {path} ({kind}) computes a weight from parameters in torch.bfloat16")
            assert refusal.endswith('set compute = "fp32", or remove the parametrization')
        assert not weight


def test_orthogonal_matrices_without_a_base_are_refused_in_bf16() -> None:
    module = Plain()
    parametrizations.orthogonal(module.blocks[1].up, use_trivialization=False)
    with pytest.raises(PlanError, match=r"blocks\.1\.up\.parametrizations\.weight\.0 \(_Orthogonal\) .* for orthogonal matrices"):
        parallelize(module, "1", compute="bf16")
