"""Experts in realised models: initial weights, recomputation as a transform, what a checkpoint keeps, loads over ranks."""

import pytest
import torch

from forge_core.layout import Layout
from forge_core.protocols.model import Observer
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.objectives import CrossEntropy
from forge_models.shape import Losses
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, fill, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.boxes import Box, local_box
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, compare, measure, share, synthetic

CPU = torch.device("cpu")
ROUTER = SigmoidTopKConfig(bias_rate=0.01, bias_schedule="warmup", bias_steps=10)
EXPERTS = MoEConfig(
    experts=4, shared=1, ffn_dim=24, first_dense=1, router=ROUTER, losses=Losses(sequence=0.1, global_batch=0.1, z=0.01)
)
SIZES = {"dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "vocab_size": 61, "max_length": 16}


def decoder(**fields):
    return DecoderConfig(**SIZES | {"moe": EXPERTS} | fields)


def case(**fields):
    settings = {"rows": 4, "micro_batch": 2, "silent": 2, "steps": 1, "grad_clip": 1e9} | fields
    return Case(decoder().build, CrossEntropy().build(), AdamWConfig(lr=1e-2).build, 61, **settings)


def made(layout="1", compute="fp64", state="fp64", **fields):
    at = Layout.parse(layout)
    plan = Plan.of([FullyShard()], at)
    return realize(Blueprint.of(decoder(**fields).build), plan, Topology.of(at, CPU), 0, compute, state)


def test_each_expert_is_drawn_under_its_own_name_with_the_scale_of_its_projection():
    part = made(moe=MoEConfig(experts=64, ffn_dim=32)).part
    experts = part.blocks["1"].mlp.experts
    specs = part.specs().tensors
    for name, std in (("gate_proj", 0.02), ("up_proj", 0.02), ("down_proj", 0.02 / 6**0.5)):
        whole, spec = getattr(experts, name).detach(), specs[f"blocks.1.mlp.experts.{name}"]
        assert float(whole.std()) == pytest.approx(std, rel=0.02)
        alone = torch.empty(whole.shape[1:], dtype=whole.dtype)
        single = type(spec)(spec.dims[1:], spec.init, spec.group)
        fill(Box(tuple(alone.shape), (0, 0), alone), single, f"blocks.1.mlp.experts.{name}[17]", 0)
        assert torch.equal(whole[17], alone)
    fewer = made(moe=MoEConfig(experts=8, ffn_dim=32)).part.blocks["1"].mlp.experts
    assert torch.equal(fewer.up_proj[5], experts.up_proj[5])  # whatever the number of its neighbors


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("state", ["fp64", "fp32"])  # one product after the other, and the grouped one
def test_recomputation_changes_no_bit(policy, state):
    setting = case(compute=state, state=state)
    plain, again = (
        measure(setting, Plan.of([], Layout()), CPU),
        measure(setting, Plan.of([Recompute(policy=policy).build()], Layout()), CPU),
    )
    assert plain.loss == again.loss
    assert all(torch.equal(plain.gradients[name], again.gradients[name]) for name in plain.gradients)


def test_buffers_keep_their_precision_whatever_the_state():
    model = made(compute="bf16", state="fp32")
    found = {name: tensor for name, tensor in model.tensors() if not isinstance(tensor, torch.nn.Parameter)}
    kept = {"router.bias": torch.float32, "router.updates": torch.int64, "load": torch.int64}
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        f"blocks.{layer}.mlp.{name}": dtype for layer in (1, 2) for name, dtype in kept.items()
    }
    assert all(float(tensor.abs().sum()) == 0 for tensor in found.values())
    pieces = {piece.name: piece for piece in model.pieces()}
    assert all(pieces[f"model/{name}"].owned for name in found)
    groups = {name: spec.group for name, spec in model.specs.tensors.items()}
    assert [groups[f"blocks.1.mlp.{name}"] for name in ("experts.up_proj", "shared.up_proj.weight")] == ["matrix"] * 2
    assert groups["blocks.1.mlp.router.weight"] == "router"


def _steps(layout, silent, bad=False):
    """Two steps' totals and biases; with `bad`, the second has a loss that is not finite."""
    model = made(layout)
    step, found = Step(model, CrossEntropy().build()), []
    layers = [module for module in model.part.modules() if isinstance(module, Observer)]
    for number in range(2):
        if bad and number:
            for _, parameter, _ in model.trainable():
                local_box(parameter).local.detach().fill_(torch.nan)
        batches = share(synthetic(case(silent=silent), number), model.topology.data_rank, model.topology.data_size, 1)
        result = step(batches)
        assert bool(result.skip) == (bad and number == 1)
        found += [module.totals.load for module in layers]
        found += [tensor.clone() for module in layers for tensor in (module.router.bias, module.router.updates, module.load)]
    return found


@pytest.mark.parametrize("silent", [0, 2])
def test_loads_and_biases_are_the_same_on_one_rank_and_on_two(world, silent):
    whole = _steps("1", silent)
    assert float(whole[0].sum()) == 2 * 4 * 16
    # Two layers of experts: their loads, then bias, updates and the loads that are kept, of each.
    _, _, bias, updates, load, *_ = whole[8:]
    assert float(bias.abs().max()) == pytest.approx(0.003)  # 1/10 and 2/10 of the rate, both against the same load
    assert int(updates) == 2 and torch.equal(load, whole[8].long())
    for found in world.run(_steps, 2, "dp2", silent):
        assert all(torch.equal(one, two) for one, two in zip(whole, found, strict=True))


def test_a_step_that_is_skipped_moves_nothing(world):
    for found in [_steps("1", 0, True), *world.run(_steps, 2, "dp2", 0, True)]:
        assert all(torch.equal(one, two) for one, two in zip(found[2:8], found[10:16], strict=True))
        assert int(found[3]) == 1


def test_the_losses_have_the_scale_that_is_documented():
    """One step's gradient of a router: that of nll / D + weights * means over all tokens, whatever the number of labels."""
    setting = case()
    found = measure(setting, Plan.of([], Layout()), CPU).gradients
    module = made().part
    batch = synthetic(setting, 0)
    scale = 1 / batch.tokens.numel()
    for layer in (1, 2):
        module.blocks[str(layer)].mlp.before_step(torch.tensor(scale, dtype=torch.float64))
    terms = module(
        batch.tokens,
        positions=batch.positions,
        documents=batch.documents,
        labels=batch.labels,
        objective=CrossEntropy().build(),
    )
    assert int(terms.tokens) < batch.tokens.numel()
    (terms.sum / terms.tokens).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-13)


def _measure(setting, layout):
    return measure(setting, Plan.of([FullyShard()], Layout.parse(layout)), CPU)


@pytest.mark.parametrize("layout", ["dp2", "hsdp2x1"])
def test_two_data_ranks_equal_one_process_with_every_loss_that_does_not_depend_on_them(world, layout):
    setting = case(steps=2)
    whole = _measure(setting, "1")
    for found in world.run(_measure, 2, setting, layout):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference
