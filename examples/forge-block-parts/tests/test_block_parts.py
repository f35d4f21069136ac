"""Each part against its formula, and a decoder of all four that trains."""

import math
from pathlib import Path

import torch
from forge_block_parts.attention import SigmoidAttention
from forge_block_parts.layers import CosineRouter, DyT
from torch.nn import functional as F

from forge_models import BlockContext, RMSNormConfig, Rope, RouterContext
from forge_testing import conforms
from forge_train import JobRanks, Run, load_recipe, read_metrics, train

RECIPE = """
base = "debug"

[model]
attention = { name = "sigmoid" }
mlp = { name = "reglu" }
norm = { name = "dyt" }

[model.moe]
experts = 4
first_dense = 1
router = { name = "cosine", temperature = 0.2 }

[train]
max_steps = 4

[[data.sources]]
name = "random"
vocab_size = 257
tokens = 4000
document = 23

[data.evaluation.held_out]
name = "random"
vocab_size = 257
tokens = 400
seed = 1

[[hooks]]
name = "log"
every = 1

[[hooks]]
name = "save"
"""


def trained(folder: Path, *overrides: str) -> Run:
    """Trains the recipe in a folder, from where it stands."""
    (folder / "recipe.toml").write_text(RECIPE)
    recipe = load_recipe(str(folder / "recipe.toml"), [f"--job.dir={folder / 'run'}", *overrides], world=1)
    run, _ = train(recipe, JobRanks())
    run.saves.close()
    return run


def test_they_conform() -> None:
    conforms("forge-block-parts")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_attention_is_the_formula_of_the_paper() -> None:
    """With equal queries and keys of zero every score is 0, and a token gets sigmoid(-log n) of each of its n values."""
    sizes = {"dim": 4, "layers": 1, "layer": 0, "heads": 1, "kv_heads": 1, "head_dim": 4, "ffn_dim": 8, "max_length": 8}
    attention = SigmoidAttention(BlockContext(**sizes, rope=Rope(), init_std=0.02, norm=RMSNormConfig())).double()
    with torch.no_grad():
        for layer in (attention.q_proj, attention.k_proj):
            layer.weight.zero_()
        for layer in (attention.v_proj, attention.o_proj):
            layer.weight.copy_(torch.eye(4))
    x = drawn(1, 5, 4)
    found = attention(x, attention.rotary(torch.arange(5), None), None)
    for row in range(5):
        weight = 1 / (1 + math.exp(math.log(row + 1)))
        torch.testing.assert_close(found[0, row], weight * x[0, : row + 1].sum(0))


def test_norm_and_router_are_their_formulas() -> None:
    norm, x = DyT(3).double(), drawn(6, 3)
    with torch.no_grad():
        for parameter, value in zip((norm.scale, norm.weight, norm.bias), (0.5, 2.0, 1.0), strict=True):
            parameter.fill_(value)
    torch.testing.assert_close(norm(x), 2 * torch.tanh(x / 2) + 1)
    router = CosineRouter(RouterContext(dim=3, experts=4, top_k=2, layer=0, init_std=0.02), temperature=0.5).double()
    with torch.no_grad():
        router.weight.copy_(drawn(4, 3))
    cosines = F.cosine_similarity(x[:, None], router.weight[None], dim=-1)
    best = cosines.topk(2, dim=-1)
    found = router(100 * x, None)
    assert torch.equal(found.experts, best.indices)
    torch.testing.assert_close(found.weights, (best.values / 0.5).softmax(-1))


def test_a_decoder_of_all_four_trains(tmp_path: Path) -> None:
    losses = [row["loss"] for row in read_metrics(trained(tmp_path).directory / "metrics.jsonl") if "loss" in row]
    assert len(losses) == 4 and losses[-1] < losses[0]
