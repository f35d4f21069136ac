"""Which weights a token meets, and which experts: by hand, token by token."""

from typing import Any

import torch
from torch import nn

from forge_models.components.decoder import DecoderConfig
from forge_models.components.layers import SwiGLU
from forge_testing.modules import filled, on_meta, specs_of
from forge_vlm.context import Modalities
from forge_vlm.fusion.modalities import ByModality, ModalityGroups
from forge_vlm.fusion.routed import SCORE_BINS, ExpertChoice, ThresholdRouting, choose_by_expert, histogram_quantile
from vlm.tiny import EXPERTS, PARTS, SIZES

SHAPE = DecoderConfig(**SIZES, **PARTS, moe=EXPERTS).shape


def layer(kind: Any, **options: Any) -> Any:
    built = on_meta(lambda: kind(SHAPE.moe, SwiGLU(), SHAPE.context(0), **options))
    return filled(built, specs_of(built), {})


def test_a_modality_is_that_of_an_id() -> None:
    modalities = Modalities({"video": (20, 24), "audio": (10, 14)})
    assert modalities.names == ("text", "audio", "video")
    assert modalities.of(torch.tensor([[1, 9, 10, 13, 14, 19, 20, 23, 24]])).tolist() == [[0, 0, 1, 1, 0, 0, 2, 2, 0]]


def test_every_token_meets_the_copy_of_its_modality() -> None:
    copies = {name: nn.Linear(3, 2).double() for name in ("text", "audio", "video")}
    module = ByModality(copies)
    modality = torch.tensor([[0, 2, 1, 0], [1, 1, 2, 0]])
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    found = module(x, ModalityGroups.of(modality, 3))
    every = list(copies.values())
    for row in range(2):
        for place in range(4):
            wanted = every[int(modality[row, place])](x[row, place])
            assert torch.allclose(found[row, place], wanted, rtol=0, atol=1e-12)


def test_an_expert_takes_the_highest_of_each_sequence() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.3, 0.2], [0.2, 0.8], [0.9, 0.1], [0.5, 0.5], [0.5, 0.5 + 1e-9]])
    sequences = torch.tensor([0, 0, 0, 4, 4, 4])
    taken = choose_by_expert(scores, sequences)  # ceil(3 / 2) = 2 of each sequence
    assert taken.int().tolist() == [[0, 1], [1, 0], [1, 1], [1, 0], [1, 1], [0, 1]]
    four = choose_by_expert(scores[:5, :1].expand(-1, 4), sequences[:5])
    assert four.sum(0).tolist() == [2, 2, 2, 2]  # ceil(3 / 4) + ceil(2 / 4)
    alike = torch.tensor([[0.5, 0.5], [0.5 + 1e-9, 0.5 - 1e-9]])
    earlier = choose_by_expert(alike, torch.tensor([0, 0]))
    assert earlier.int().tolist() == [[1, 1], [0, 0]], "the earlier one, and not by rounding"


def test_the_router_that_foresees_changes_nothing_that_the_model_learns() -> None:
    module = layer(ExpertChoice).train()
    sequences = torch.zeros(1, 6, dtype=torch.int64)
    gradients = []
    for scale in (1.0, -3.0):
        with torch.no_grad():
            module.foresight.mul_(scale)
        x = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
        module.zero_grad()
        module(x, sequences=sequences)[0].square().sum().backward()
        gradients.append((x.grad, module.weight.grad))
        assert module.foresight.grad.abs().sum() > 0
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_foresight_learns_the_choice() -> None:
    """Its loss falls to almost nothing where the choice follows from a token: then evaluation is training."""
    module = layer(ExpertChoice).train()
    x = torch.randn(1, 64, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sequences = torch.zeros(1, 64, dtype=torch.int64)
    foresight = [module.foresight, module.foresight_bias]
    optimizer = torch.optim.Adam(foresight, lr=0.1)
    logits = (x[0] @ module.weight.T).detach()
    for _ in range(300):
        optimizer.zero_grad()
        module.choose(x[0], logits, sequences[0])[1].sum().backward()
        optimizer.step()
    wanted = module(x, sequences=sequences)[0]
    module.eval()
    assert torch.allclose(module(x, sequences=sequences)[0], wanted, rtol=0, atol=1e-10)


def test_padding_is_with_no_expert() -> None:
    for module in (layer(ExpertChoice), layer(ThresholdRouting)):
        module.train()
        x = torch.randn(1, 6, 16, dtype=torch.float64)
        mask = torch.tensor([[True, True, False, True, False, True]])
        sequences = torch.tensor([[0, 0, 1, 2, 3, 4]])
        y, router_stats = module(x, mask, sequences=sequences)
        assert not y[~mask].any()
        assert router_stats[SHAPE.moe.experts] == 4


def test_trials_c5_agreement_counts_no_padding() -> None:
    """A share of the decisions about real tokens, so at most 1; those of padding are in neither number."""
    x = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    mask = (torch.arange(9) % 3 > 0).unsqueeze(0)
    sequences = torch.arange(9).unsqueeze(0) // 3
    for module in (layer(ExpertChoice), layer(ThresholdRouting)):
        logits = x[0] @ module.weight.T
        in_training, in_evaluation = (module.train(mode).choose(x[0], logits, sequences[0])[0] for mode in (True, False))
        module.train().observe(module(x, mask, sequences=sequences)[1])
        module.after_step(module.statistics(), torch.tensor(0.0))
        wanted = (in_training == in_evaluation)[mask[0]].double().mean()
        assert module.report()["agreement"] == wanted <= 1
        assert isinstance(module, ThresholdRouting) or wanted < 1


def test_a_token_gets_of_each_expert_that_it_is_with_by_the_sigmoid_of_its_score() -> None:
    """Token by token; scores of several experts do not share one sum, as a softmax would have it."""
    for module in (layer(ExpertChoice), layer(ThresholdRouting)):
        module.train()
        x = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        sequences = torch.zeros(1, 7, dtype=torch.int64)
        chosen, _, _ = module.choose(x[0], x[0] @ module.weight.T, sequences[0])
        assert chosen.sum(1).max() > 1
        experts = module.experts
        wanted = torch.zeros_like(x[0])
        for token, expert in chosen.nonzero().tolist():
            gate, up, down = (weight[expert] for weight in (experts.gate_proj, experts.up_proj, experts.down_proj))
            hidden = nn.functional.silu(gate @ x[0, token]) * (up @ x[0, token])
            wanted[token] += 1 / (1 + torch.exp(-module.weight[expert] @ x[0, token])) * (down @ hidden)
        assert torch.allclose(module(x, sequences=sequences)[0][0], wanted, rtol=0, atol=1e-12)


def test_padding_teaches_foresight_nothing() -> None:
    module = layer(ExpertChoice).train()
    x = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True, False, False]])
    sequences = torch.tensor([[0, 0, 1, 2, 3, 3]])
    found = []
    for kept, masked in ((torch.ones(6, dtype=torch.bool), mask), (mask[0], None)):
        module.zero_grad()
        module.before_step(torch.tensor(1.0))
        module(x[:, kept], masked, sequences=sequences[:, kept])[0].sum().backward()
        found.append((module.foresight.grad.clone(), module.foresight_bias.grad.clone()))
    assert all(torch.allclose(one, two, rtol=0, atol=1e-12) for one, two in zip(*found, strict=True))
    assert found[0][1].any()


def test_a_quantile_of_counts() -> None:
    """Against torch's of the values themselves, to the width of a bin."""
    values = torch.rand(4000, 3, dtype=torch.float64)
    counts = torch.stack([torch.histc(column, SCORE_BINS, 0, 1) for column in values.unbind(1)], 1)
    for share in (0.25, 0.5, 0.75, 0.9):
        assert torch.allclose(histogram_quantile(counts, share), values.quantile(share, 0), rtol=0, atol=2 / SCORE_BINS)


def test_a_threshold_follows_the_scores_and_not_the_micro_batches() -> None:
    """Each expert then has its share of the tokens."""
    module = layer(ThresholdRouting, rate=1.0).train()
    with torch.no_grad():
        module.threshold.zero_()
    x = torch.randn(1, 400, 16, dtype=torch.float64)
    sequences = torch.zeros(1, 400, dtype=torch.int64)

    def statistics(*parts: torch.Tensor) -> torch.Tensor:
        module.before_step(torch.tensor(1 / 400))
        for part in parts:
            module.observe(module(part, sequences=sequences[:, : part.shape[1]])[1])
        return module.statistics()

    whole = statistics(x)
    assert torch.equal(statistics(x[:, :100], x[:, 100:]), whole)
    module.after_step(whole, torch.tensor(1.0))
    assert not module.threshold.any(), "a step that is skipped moves nothing"
    module.after_step(whole, torch.tensor(0.0))
    shares = statistics(x)[: SHAPE.moe.experts] / 400
    assert torch.allclose(shares, torch.full_like(shares, 1 / SHAPE.moe.experts), atol=0.02)
    assert module.report()["used"] > 0
