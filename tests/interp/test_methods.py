"""Each method against its definition, on models whose answer is known."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from forge_interp.attention_scores import induction_scores
from forge_interp.captures import capture
from forge_interp.edits import add, edit, mean, replace
from forge_interp.methods import sae as autoencoders
from forge_interp.methods.lens import TunedLens, direct_logit_attribution, divergences, lens_losses, logit_lens, tuned_lens
from forge_interp.methods.patching import activation_patching, attribution_patching, head_ablation
from forge_interp.methods.probes import dead_neurons, effective_rank, linear_probe, steering_vector
from forge_interp.methods.sae import SAE, largest, loss_recovered, quality, train_sae
from forge_interp.store import ActivationStore, ActivationWriter, record
from forge_interp.tap_names import InterpError
from forge_models.components.attentions import GQA
from forge_models.components.layers import LayerNormConfig
from forge_models.generation import generate
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
        {"norm_placement": "sandwich", "logit_multiplier": 0.3},
        {"norm": LayerNormConfig(weight=False, bias=False)},
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
        direction = (model.head.weight[right] - model.head.weight[wrong]) * (
            1 if model.norm.weight is None else model.norm.weight
        )
        by_hand = (direction * scaled / (spread + model.norm.eps).sqrt()).sum(1)
        torch.testing.assert_close(
            found.parts[found.names.index("blocks.1.attention.heads.2")], by_hand.detach(), rtol=1e-6, atol=1e-8
        )


def test_attributions_of_capped_logits_are_refused(make, tokens):
    with pytest.raises(InterpError, match="a cap on logits is not linear"):
        direct_logit_attribution(make(soft_cap=5.0), tokens(1, 4), torch.tensor([1]))


def test_attributions_through_scaled_blocks_are_refused(make, tokens):
    with pytest.raises(InterpError, match="layer_scalar = true scales the stream"):
        direct_logit_attribution(make(layer_scalar=True), tokens(1, 4), torch.tensor([1]))


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
    with pytest.raises(InterpError, match="these values have no gradient"):
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
    with pytest.raises(InterpError, match="with one label"):
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


def stored(folder, rows, name="blocks.0.residual"):
    """A store of given rows."""
    taps = {name: {"alias": "", "shape": list(rows.shape[1:]), "dtype": "float32"}}
    writer = ActivationWriter(folder, {}, taps, shard_bytes=100_000)
    for at in range(0, len(rows), 100):
        part = rows[at : at + 100]
        index = torch.arange(at, at + len(part))
        writer.add({name: part}, {"input": index, "position": index * 0, "token": index * 0}, 1)
    writer.close()
    return ActivationStore(folder)


def test_an_untrained_lens_is_the_logit_lens(make, tokens):
    model, ids = make(spread=5.0), tokens(2, 9)
    zero = torch.zeros
    lens = TunedLens(zero(2, 32, 32), zero(2, 32), zero(2), zero(2))
    for positions in (-1, [0, 4]):
        found, expected = (one(model, ids, positions) for one in (lens.logits, logit_lens))
        torch.testing.assert_close(found, expected)


def test_divergence_is_that_of_torch_and_zero_for_the_right_map():
    generator = torch.Generator().manual_seed(0)
    last, matrix, head = (torch.randn(*shape, generator=generator) for shape in ((30, 6), (6, 6), (11, 6)))
    target = (last @ head.T).log_softmax(-1)
    stream = (last - 0.5) @ torch.linalg.inv(torch.eye(6) + matrix).T  # stream + stream A' + 0.5 = last
    found = divergences(
        torch.stack([stream, stream]), target, torch.stack([matrix, 0 * matrix]), torch.full((2, 6), 0.5), lambda x: x @ head.T
    )
    assert float(found[0]) < 1e-6
    expected = F.kl_div(((stream + 0.5) @ head.T).log_softmax(-1), target, reduction="batchmean", log_target=True)
    torch.testing.assert_close(found[1], expected)


def test_a_lens_is_fitted_to_the_model_and_tested_on_other_inputs(make, tokens, tmp_path):
    model = make(spread=4.0)
    inputs = list(tokens(40, 24))
    model.head.weight.requires_grad_(False)
    lens = tuned_lens(model, inputs, steps=120, lr=3e-3)
    assert not model.head.weight.requires_grad
    assert model.embed.weight.requires_grad
    assert model.embed.weight.grad is None
    assert (lens.after < 0.8 * lens.before).all()
    fresh = tokens(6, 24, seed=9)
    with torch.no_grad():
        target = model(fresh).log_softmax(-1)
    places = list(range(24))
    for layer in range(2):
        plain, tuned = (
            float(
                F.kl_div(one(model, fresh, places)[layer].log_softmax(-1), target, reduction="none", log_target=True)
                .sum(-1)
                .mean()
            )
            for one in (logit_lens, lens.logits)
        )
        assert tuned < plain
        assert float(lens.before[layer]) == pytest.approx(plain, rel=0.3)
    again = tuned_lens(model, inputs, steps=120, lr=3e-3)
    assert all(torch.equal(one, other) for one, other in zip(again, lens, strict=True))
    lens.save(tmp_path / "lens.safetensors")
    back = TunedLens.load(tmp_path / "lens.safetensors")
    assert all(torch.equal(one, other) for one, other in zip(back, lens, strict=True))
    with pytest.raises(InterpError, match="at least 2 inputs and 1 step, not 1 and"):
        tuned_lens(model, inputs[:1])
    with pytest.raises(InterpError, match="is not a tuned lens"):
        TunedLens.load(tmp_path / "nothing")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Rows that are sums of 3 of 24 directions in 16 dimensions, away from zero; the directions."""
    generator = torch.Generator().manual_seed(0)
    directions = F.normalize(torch.randn(24, 16, generator=generator), dim=1)
    chosen = torch.rand(6000, 24, generator=generator).topk(3).indices
    parts = torch.zeros(6000, 24).scatter(1, chosen, 1 + torch.rand(6000, 3, generator=generator))
    rows = parts @ directions * 7 + torch.randn(16, generator=generator) * 20
    return stored(tmp_path_factory.mktemp("planted") / "store", rows), directions


def test_planted_directions_are_found(planted):
    store, directions = planted
    sae, found = train_sae(store, "blocks.0.residual", latents=48, k=3, steps=1500, batch=256, lr=3e-3)
    torch.testing.assert_close(sae.decoder.norm(dim=1), torch.ones(48))
    assert found.explained > 0.9
    assert found.rows == 600
    alike = (directions @ sae.decoder.T).amax(1)
    assert float((alike > 0.95).double().mean()) > 0.8
    x = store.read("blocks.0.residual", 5400)
    latents = sae.encode(x)
    assert found.l0 == pytest.approx(float((latents != 0).sum(1).double().mean()))
    assert found.l0 <= 3
    assert found.dead == int((latents == 0).all(0).sum())
    missed = (x - sae.reconstruct(x)).double().square().sum()
    assert found.explained == pytest.approx(1 - float(missed / (x.double() - x.double().mean(0)).square().sum()), abs=1e-6)
    one, _ = train_sae(store, "blocks.0.residual", latents=48, k=1, steps=300, batch=256, lr=3e-3)
    assert quality(one, store, "blocks.0.residual", 5400).explained < found.explained - 0.2


def test_rows_without_structure_are_explained_less(planted, tmp_path):
    store, _ = planted
    rows = store.read("blocks.0.residual")
    noise = torch.linalg.cholesky(torch.cov(rows.T)) @ torch.randn(16, 6000)
    flat = stored(tmp_path / "flat", noise.T + rows.mean(0))
    options = {"latents": 48, "k": 3, "steps": 600, "batch": 256, "lr": 3e-3}
    assert train_sae(flat, "blocks.0.residual", **options)[1].explained < 0.8
    assert train_sae(store, "blocks.0.residual", **options)[1].explained > 0.8


def test_rows_are_read_in_chunks_whose_first_ones_need_not_be_like_the_others(tmp_path, monkeypatch):
    """What is held at a time bounds memory; the center is learned, not that of the first chunk."""
    generator = torch.Generator().manual_seed(0)
    rows = 3 * torch.rand(1200, 1, generator=generator) * F.normalize(torch.randn(1, 6, generator=generator), dim=1)
    rows[100:] += torch.tensor([1.0, -1, 2, 0, 1, 0])
    store = stored(tmp_path / "store", rows)
    monkeypatch.setattr(autoencoders, "CHUNK", 50)
    monkeypatch.setattr(autoencoders, "MIXED", 2)
    sizes, read = [], ActivationStore.read
    monkeypatch.setattr(ActivationStore, "read", lambda self, *given: (sizes.append(given), read(self, *given))[1])
    sae, found = train_sae(store, "blocks.0.residual", latents=4, k=1, steps=800, batch=50, lr=1e-2)
    assert {start for _, start, _ in sizes if start} >= set(range(50, 1080, 50))
    assert max(stop - start for _, start, stop in sizes) <= 100
    assert found.explained > 0.5
    fitted = rows[100:1080]
    missed = (fitted - sae.reconstruct(fitted)).square().sum() / (fitted - fitted.mean(0)).square().sum()
    assert float(missed) < 0.5


def test_latents_that_do_nothing_are_revived(planted):
    store, _ = planted
    options = {"latents": 256, "k": 3, "steps": 800, "batch": 256, "lr": 3e-3}
    alive = train_sae(store, "blocks.0.residual", revive=50, **options)[1]
    left = train_sae(store, "blocks.0.residual", revive=10**6, **options)[1]
    assert alive.dead < left.dead


def test_an_autoencoder_of_all_latents_is_spliced_in_without_a_trace(make, tokens, tmp_path):
    model, ids = make(spread=4.0), tokens(8, 20)
    eye = torch.eye(32)
    whole = SAE(torch.cat([eye, -eye]), torch.zeros(64), torch.cat([eye, -eye]), torch.randn(32), 64)
    with torch.no_grad():
        expected = model(ids)
        with edit(model, "blocks.1.residual", replace(whole.reconstruct)):
            torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)
    labels = torch.where(torch.arange(20) % 5 == 0, -100, expected.argmax(-1))
    assert loss_recovered(model, "blocks.1.residual", whole, ids, labels) == pytest.approx(1, abs=1e-3)
    nothing = whole._replace(decoder=whole.decoder * 0, decoder_bias=torch.zeros(32))
    assert loss_recovered(model, "blocks.1.residual", nothing, ids, labels) == pytest.approx(0, abs=1e-6)
    record(model, list(ids), tmp_path / "store", "blocks.1.residual")
    sae, _ = train_sae(ActivationStore(tmp_path / "store"), "blocks.1.hook_resid_pre", latents=64, k=16, steps=150, batch=32)
    with torch.no_grad(), edit(model, "blocks.1.residual", replace(sae.reconstruct)), capture(model, "blocks.1.residual") as seen:
        model(ids)
    with torch.no_grad(), capture(model, "blocks.1.residual") as plain:
        model(ids)
    torch.testing.assert_close(seen["blocks.1.residual"], sae.reconstruct(plain["blocks.1.residual"]))
    sae.save(tmp_path / "sae.safetensors", {"name": "blocks.1.residual"})
    back = SAE.load(tmp_path / "sae.safetensors")
    assert back.k == 16
    assert all(torch.equal(one, other) for one, other in zip(back[:4], sae[:4], strict=True))


def test_sizes_that_make_no_sense_are_refused(planted, tmp_path):
    store, _ = planted
    name = "blocks.0.residual"
    for options, match in (
        ({"latents": 4, "k": 5}, "k = 5, .* k at most 4"),
        ({"latents": 4, "k": 0}, "k = 0, .* at least 1"),
        ({"latents": 4, "k": 2, "steps": 0}, "steps = 0"),
        ({"latents": 4, "k": 2, "held_out": 0.0}, "fewer than two"),
        ({"latents": 4, "k": 2, "held_out": 1.0}, "fewer than two"),
    ):
        with pytest.raises(InterpError, match=match):
            train_sae(store, name, **options)
    flat = stored(tmp_path / "flat", torch.ones(200, 4))
    with pytest.raises(InterpError, match=r"all rows of blocks.0.residual are equal"):
        train_sae(flat, name, latents=4, k=1)
    with pytest.raises(InterpError, match="is not a sparse autoencoder"):
        SAE.load(tmp_path / "nothing")
    assert largest(torch.tensor([[3.0, 1, 2]]), 2).tolist() == [[3, 0, 2]]
    assert largest(torch.tensor([[3.0, 1, 2]]), 9).tolist() == [[3, 1, 2]]
