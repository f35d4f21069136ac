"""Each method against its definition, on models whose answer is known."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from forge_models.components.attentions import GQA
from forge_models.components.layers import LayerNormConfig
from forge_models.generation import generate
from forge_models.interp.attention_scores import induction_scores
from forge_models.interp.capture import capture
from forge_models.interp.edit import add, edit, mean
from forge_models.interp.methods.lens import direct_logit_attribution, lens_losses, logit_lens
from forge_models.interp.methods.patching import activation_patching, attribution_patching, head_ablation
from forge_models.interp.methods.probes import dead_neurons, effective_rank, linear_probe, steering_vector
from forge_models.interp.taps import InterpError
from forge_models.objectives import CrossEntropy


def difference(logits):
    return logits[0, -1, 5] - logits[0, -1, 9]


def test_the_logit_lens_is_a_model_with_fewer_layers(make, tokens):
    model, rows = make(layers=3, spread=5.0), tokens(2, 8)
    found = logit_lens(model, rows, positions=[3, -1])
    for layer in range(4):
        short = make(layers=3, spread=5.0)
        for gone in range(layer, 3):
            del short.blocks[str(gone)]
        torch.testing.assert_close(found[layer], short(rows)[:, [3, 7]], rtol=1e-5, atol=1e-5)


def test_losses_of_the_lens_end_with_the_loss(make, tokens):
    model, rows = make(spread=5.0, dtype=torch.float64), tokens(2, 9)
    labels = rows[:, 1:].clone()
    labels[0, :3] = -100
    found = lens_losses(model, rows[:, :-1], labels)
    terms = model(rows[:, :-1], labels=labels, objective=CrossEntropy().build())
    assert found.shape == (3,)
    torch.testing.assert_close(found[-1], (terms.sum / terms.tokens).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm": LayerNormConfig(), "attention": GQA(output_bias=True), "residual_multiplier": 0.5},
        {"norm_placement": "sandwich"},
    ],
)
def test_attributions_sum_to_the_logit(make, tokens, fields):
    model, rows = make(spread=5.0, dtype=torch.float64, **fields), tokens(2, 8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel()))
    right, wrong = torch.tensor([5, 6]), torch.tensor([9, 1])
    logits = model(rows)[:, 3]
    expected = logits[[0, 1], right] - logits[[0, 1], wrong]
    found = direct_logit_attribution(model, rows, right, wrong, position=3)
    torch.testing.assert_close(found.total, expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.parts.sum(0), expected.detach(), rtol=1e-6, atol=1e-6)
    assert len(found.names) == len(found.parts)
    one = direct_logit_attribution(model, rows, right)
    torch.testing.assert_close(one.parts.sum(0), model(rows)[[0, 1], -1, right].detach(), rtol=1e-6, atol=1e-6)
    if "norm_placement" not in fields:  # one head by hand: its columns of the projection, through the scale of the final norm
        with capture(model, ["blocks.1.attention.heads", "residual"], positions=3) as seen:
            model(rows)
        written = seen["blocks.1.attention.heads"][:, 0, 2] @ model.blocks["1"].attention.o_proj.weight[:, 16:24].T
        stream, scaled = seen["residual"][:, 0], written * fields.get("residual_multiplier", 1)
        if fields:
            scaled, spread = scaled - scaled.mean(1, keepdim=True), stream.var(1, unbiased=False, keepdim=True)
        else:
            spread = stream.square().mean(1, keepdim=True)
        direction = (model.head.weight[right] - model.head.weight[wrong]) * model.norm.weight
        by_hand = (direction * scaled / (spread + model.norm.eps).sqrt()).sum(1)
        torch.testing.assert_close(
            found.parts[found.names.index("blocks.1.attention.heads.2")], by_hand.detach(), rtol=1e-6, atol=1e-8
        )


def test_attributions_of_capped_logits_are_refused(make, tokens):
    with pytest.raises(InterpError, match="a cap on logits is not linear"):
        direct_logit_attribution(make(soft_cap=5.0), tokens(1, 4), torch.tensor([1]))


def test_patching_every_value_of_a_layer_restores_the_clean_run(make, tokens):
    model, clean, corrupted = make(spread=5.0), tokens(1, 6), tokens(1, 6)
    corrupted[0, 2] = 50
    found = activation_patching(model, clean, corrupted, difference, ["blocks.0.residual", "residual"])
    cleaned, broken = difference(model(clean)), difference(model(corrupted))
    # At the input only the token that differs carries the difference, and at the end only the last position.
    torch.testing.assert_close(found["blocks.0.residual"][2], cleaned.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["blocks.0.residual"][[0, 1, 3, 4, 5]], broken.detach().expand(5), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["residual"][5], cleaned.detach(), rtol=1e-4, atol=1e-4)
    twice, one = corrupted.clone(), corrupted.clone()
    twice[0, 0] = one[0, 0] = 51
    one[0, 2] = clean[0, 2]  # each position is patched alone
    alone = activation_patching(model, clean, twice, difference, "blocks.0.residual")["blocks.0.residual"][2]
    torch.testing.assert_close(alone, difference(model(one)).detach(), rtol=1e-4, atol=1e-4)
    with pytest.raises(InterpError, match="must have one shape"):
        activation_patching(model, clean, corrupted[:, :5], difference, "residual")


def test_attribution_patching_is_the_slope_of_activation_patching(make, tokens):
    model, clean, corrupted = make(spread=5.0, dtype=torch.float64), tokens(1, 6), tokens(1, 6, seed=4)
    names = ["blocks.1.residual", "blocks.1.attention.heads"]
    found = attribution_patching(model, clean, corrupted, difference, names)
    assert found["blocks.1.attention.heads"].shape == (1, 6, 4)
    with torch.no_grad(), capture(model, names) as kept:
        model(clean)
    with torch.no_grad(), capture(model, names) as seen:
        before = difference(model(corrupted))
    step = 1e-6
    for name, where in (
        ("blocks.1.residual", {"positions": [3]}),
        ("blocks.1.attention.heads", {"positions": [2], "heads": [1]}),
    ):
        change = kept[name] - seen[name]
        change = change if "heads" not in where else change[:, :, where["heads"]]
        with torch.no_grad(), edit(model, name, add(change, step), **where):
            slope = (difference(model(corrupted)) - before) / step
        mine = found[name][0, where["positions"][0]]
        mine = mine if "heads" not in where else mine[where["heads"][0]]
        torch.testing.assert_close(mine, slope.detach(), rtol=1e-4, atol=1e-7)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(InterpError, match="no gradient comes"):
        attribution_patching(model, clean, corrupted, difference, names)


def test_ablated_heads_are_zero_columns_of_the_output_projection(make, tokens):
    model, rows = make(spread=5.0), tokens(1, 6)
    found = head_ablation(model, rows, difference)
    assert found.shape == (2, 4)
    with torch.no_grad():
        weight = model.blocks["1"].attention.o_proj.weight
        before = weight.clone()
        for head in range(4):
            weight.copy_(before)
            weight[:, head * 8 : head * 8 + 8] = 0
            torch.testing.assert_close(found[1, head], difference(model(rows)), rtol=1e-4, atol=1e-4)
        weight.copy_(before)
    assert not torch.allclose(found, head_ablation(model, rows, difference, mean()))


def test_a_head_that_looks_behind_the_last_occurrence_has_induction_score_one(make):
    """Keys of the first half are set to the query that should find them: key j + 1 answers the query of position n + j."""
    model, n = make(layers=1), 6
    rows = torch.cat([torch.arange(10, 10 + n)] * 2)[None]
    units = torch.eye(8)[:n]

    def set_queries(name, x, _):
        return torch.cat([torch.zeros(1, n, 4, 8), (units * 200)[None, :, None].expand(1, n, 4, 8)], 1)

    def set_keys(name, x, _):
        keys = torch.zeros(1, 2 * n, 2, 8)
        keys[0, 1 : n + 1] = units[:, None]
        return keys

    with edit(model, "blocks.0.attention.q", set_queries, heads=[0, 1, 2, 3]), edit(model, "blocks.0.attention.k", set_keys):
        found = induction_scores(model, rows)
    torch.testing.assert_close(found, torch.ones(1, 4), rtol=0, atol=1e-4)
    uniform = make(layers=1)
    with torch.no_grad():
        uniform.blocks["0"].attention.q_proj.weight.zero_()
    expected = sum(1 / (n + j + 1) for j in range(n)) / n
    torch.testing.assert_close(induction_scores(uniform, rows), torch.full((1, 4), expected), rtol=1e-4, atol=0)
    with pytest.raises(InterpError, match="a sequence of tokens twice"):
        induction_scores(model, torch.arange(12)[None])


def test_effective_rank_and_dead_neurons():
    basis = torch.linalg.qr(torch.randn(400, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    basis = torch.linalg.qr(basis - basis.mean(0))[0]
    assert float(effective_rank(basis[:, :4] @ torch.eye(4, 10, dtype=torch.float64))) == pytest.approx(4, rel=1e-6)
    sizes = torch.tensor([3.0, 1.0], dtype=torch.float64)
    entropy = -(0.75 * torch.tensor(0.75).log() + 0.25 * torch.tensor(0.25).log())
    assert float(effective_rank(basis[:, :2] * sizes)) == pytest.approx(float(entropy.exp()), rel=1e-6)
    with pytest.raises(InterpError, match="all rows are equal"):
        effective_rank(torch.ones(5, 3))
    hidden = torch.tensor([[[0.0, 0.5, 0.0], [0.0, 0.0, -0.01]]])
    assert dead_neurons(hidden).tolist() == [True, False, False]
    assert dead_neurons(hidden, threshold=0.1).tolist() == [True, False, True]


def test_a_probe_finds_what_is_planted_and_nothing_in_shuffled_labels():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 10, generator=generator) * torch.linspace(0.1, 5, 10) + 3
    labels = ((x[:, 2] - 3) / x[:, 2].std() + 0.2 * torch.randn(600, generator=generator) > 0).long()
    found = linear_probe(x, labels)
    assert found.accuracy > 0.85
    assert found.chance < 0.7
    shuffled = linear_probe(x, labels[torch.randperm(600, generator=generator)])
    assert shuffled.accuracy < shuffled.chance + 0.1
    logits = x.double() @ found.weight.T + found.bias
    assert float((logits.argmax(1) == labels).double().mean()) > 0.88
    # The same objective: scikit-learn sums over rows and has 1 / (2 C) |w|^2.
    rows = (x - x.mean(0)) / x.std(0)
    everything = linear_probe(torch.cat([rows, rows[:3]]), torch.cat([labels, labels[:3]]), held_out=3 / 603, groups=None)
    theirs = LogisticRegression(C=1 / (1e-2 * 600), tol=1e-10, max_iter=2000).fit(rows.numpy(), labels.numpy())
    ours = everything.weight[1] - everything.weight[0]
    cosine = F.cosine_similarity(ours, torch.from_numpy(theirs.coef_[0]).double(), dim=0)
    assert float(cosine) > 0.999


def test_groups_are_held_out_together():
    groups = torch.arange(40).repeat_interleave(10)
    x = F.one_hot(groups, 40).double() + 0.01 * torch.randn(400, 40, generator=torch.Generator().manual_seed(1))
    labels = (torch.rand(40, generator=torch.Generator().manual_seed(2)) > 0.5).long()[groups]
    assert linear_probe(x, labels).accuracy > 0.95  # the group is known, and so is its label
    assert linear_probe(x, labels, groups=groups).accuracy < 0.8
    with pytest.raises(InterpError, match="must be as many"):
        linear_probe(x, labels[:5])
    with pytest.raises(InterpError, match="two classes"):
        linear_probe(x, labels * 0)
    with pytest.raises(InterpError, match="two classes"):
        linear_probe(x, labels, held_out=0.0)


def test_a_steering_vector_is_a_difference_of_means_and_steers(make):
    model = make()
    with capture(model, "blocks.1.residual") as seen:
        model(torch.tensor([[5, 5, 5, 5]]))
        model(torch.tensor([[9, 9, 9]]))
    one, other = seen.each("blocks.1.residual")
    vector = steering_vector(one, other)
    torch.testing.assert_close(vector, (one[0].mean(0) - other[0].mean(0)).double(), rtol=1e-5, atol=1e-6)
    plain = generate(model, [[1, 2]], max_tokens=6)
    with edit(model, "blocks.1.residual", add(vector.float(), 20.0)):
        assert generate(model, [[1, 2]], max_tokens=6) != plain
