"""The loss `pooled` is that of transformers: value, gradients, and the two keys of a configuration that say it."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from forge_core.errors import ConfigError
from forge_core.layout import Layout
from forge_models.blocks.moe.layer import ExpertLayer, Totals
from forge_models.blocks.moe.routers import pooled
from forge_models.checks import experts_see_other_tokens
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import config_of, decoder_of, misfits
from forge_models.hf.reader import Folder
from forge_models.objectives import CrossEntropy
from forge_models.shape import Losses
from forge_parallel.model.plan import Plan
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, Measurement, compare, measure
from harness.pool import World
from models.hf.published import folder_of, reference, spread
from models.hf.zoo import CASES, SIZES, tokens

COEFFICIENT = 0.7
PARTS = ("mixtral", "qwen3_moe-raw")


def experts(model: torch.nn.Module) -> list[ExpertLayer]:
    return [module for module in model.modules() if isinstance(module, ExpertLayer)]


def configuration(case: str) -> dict[str, Any]:
    """A configuration of one of the kinds that have the loss, switched on; in the second not every layer has experts."""
    kind, keys = CASES[case]
    return (
        SIZES
        | {"num_hidden_layers": 6, "model_type": kind, "output_router_logits": True}
        | keys
        | {"router_aux_loss_coef": COEFFICIENT}
    )


@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("case", PARTS)
def test_w12_the_auxiliary_loss_and_its_gradients_are_those_of_transformers(case: str, again: bool, tmp_path: Path) -> None:
    values = configuration(case)
    theirs = spread(reference(values)).train()
    folder = Folder(folder_of(theirs, values, tmp_path))
    moe = folder.model.moe
    assert moe is not None and moe.losses == Losses(pooled=COEFFICIENT)
    ours: Any = folder.model.build().double()
    ours.load_state_dict(folder.read(list(folder.tensors)))
    if again:
        for block in ours.blocks.values():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    rows = tokens()
    found = theirs(rows, labels=rows)
    found.loss.backward()
    assert found.aux_loss.item() > moe.top_k, "no load is so even"

    for layer in experts(ours):
        layer.before_step(torch.tensor(1 / rows.numel(), dtype=torch.float64))
    labels = rows.roll(-1, 1)
    labels[:, -1] = -100
    terms = ours.train()(rows, labels=labels, objective=CrossEntropy().build())
    (terms.sum / terms.tokens).backward()
    share = [float(Totals.of(layer.statistics()).loss) for layer in experts(ours)]
    assert sum(share) / rows.numel() == pytest.approx(COEFFICIENT * found.aux_loss.item(), rel=1e-5)

    mine = {name: parameter.grad for name, parameter in ours.named_parameters()}
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, place in folder._places.items():
        if name.endswith("router.weight"):
            other = gradients[place.names[0].replace("block_sparse_moe", "mlp")]
            torch.testing.assert_close(mine[name], other, rtol=1e-4, atol=1e-6 * float(other.abs().max()))
    torch.testing.assert_close(mine["embed.weight"], gradients["model.embed_tokens.weight"], rtol=1e-4, atol=1e-6)


def test_w12_pooled_parts_add_up_to_transformers_function() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    generator = torch.Generator().manual_seed(3)
    logits = tuple(torch.randn(50, 7, generator=generator) for _ in range(4))
    chosen = [layer.softmax(-1).topk(3).indices for layer in logits]
    counts = torch.stack([torch.nn.functional.one_hot(layer, 7).sum((0, 1)) for layer in chosen])
    sums = torch.stack([layer.softmax(-1).sum(0) for layer in logits])
    expected = load_balancing_loss_func(logits, 7, 3)
    torch.testing.assert_close(pooled(counts, sums, 3).sum() / 50, expected, rtol=1e-5, atol=0)


def test_w12_the_coefficient_counts_where_transformers_uses_it() -> None:
    values = configuration("mixtral")
    for change, weight in (({}, 0.7), ({"output_router_logits": False}, 0.0), ({"router_aux_loss_coef": 0}, 0.0)):
        decoder = decoder_of(FAMILIES["mixtral"], values | change, "here")
        assert decoder.moe is not None and decoder.moe.losses.pooled == weight
        written = config_of(FAMILIES["mixtral"], decoder)
        assert (written["output_router_logits"], written["router_aux_loss_coef"]) == (weight > 0, weight)
        assert misfits(FAMILIES["mixtral"], decoder) == []
    with pytest.raises(ConfigError, match="router_aux_loss_coef: expected a positive number, not -1"):
        decoder_of(FAMILIES["mixtral"], values | {"router_aux_loss_coef": -1}, "here")


def test_w12_pooled_is_refused_where_a_rank_has_not_all_layers_and_rows() -> None:
    model = DecoderConfig(dim=32, layers=2, heads=4, vocab_size=97, moe=MoEConfig(losses=Losses(pooled=0.1)))
    job = SimpleNamespace(model=model, transforms={})
    assert list(experts_see_other_tokens(job, Layout.parse("dp4"))) == []
    for layout in ("pp2", "cp2", "dp2ep2"):
        assert [fault.key for fault in experts_see_other_tokens(job, Layout.parse(layout))] == ["model.moe.losses.pooled"]
    job.transforms["compile"] = object()
    assert [fault.key for fault in experts_see_other_tokens(job, Layout.parse("dp1"))] == ["model.moe.losses.pooled"]
    part = model.build()
    part.head = part.norm = None
    with pytest.raises(ValueError, match="a pipeline stage has only some of them"):
        part(tokens(1, 4))
    assert model.layout_dependent == ("model.moe.losses.pooled",)


def measured(layout: str) -> Measurement:
    moe = MoEConfig(experts=4, ffn_dim=8, first_dense=1, losses=Losses(pooled=0.5))
    decoder = DecoderConfig(dim=16, layers=3, heads=4, kv_heads=2, ffn_dim=24, vocab_size=61, max_length=32, moe=moe)
    case = Case(decoder.build, CrossEntropy().build(), AdamWConfig(lr=1e-2).build, 61, rows=4, micro_batch=1, steps=2)
    return measure(case, Plan.of([FullyShard(), Recompute()], Layout.parse(layout)), torch.device("cpu"))


def test_w12_pooled_on_data_parallel_ranks_equals_one_process_with_the_same_micro_batches(world: World) -> None:
    whole = measured("1")
    for found in world.run(measured, 2, "dp2"):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference
