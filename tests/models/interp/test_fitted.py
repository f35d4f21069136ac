"""What is fitted to activations: the tuned lens and sparse autoencoders, on problems whose answers are known."""

import pytest
import torch
from torch.nn import functional as F

from forge_models.interp.capture import capture
from forge_models.interp.edit import edit, replace
from forge_models.interp.methods import sae as autoencoders
from forge_models.interp.methods.lens import TunedLens, divergences, logit_lens, tuned_lens
from forge_models.interp.methods.sae import SAE, largest, loss_recovered, quality, train_sae
from forge_models.interp.recorder import record
from forge_models.interp.store import ActivationStore, StoreWriter
from forge_models.interp.taps import InterpError


def stored(folder, rows, name="blocks.0.residual"):
    """A store of given rows."""
    taps = {name: {"alias": "", "shape": list(rows.shape[1:]), "dtype": "float32"}}
    writer = StoreWriter(folder, {}, taps, shard_bytes=100_000)
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
    with pytest.raises(InterpError, match="1 inputs"):
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
        ({"latents": 4, "k": 5}, "k 5 of 4 latents"),
        ({"latents": 4, "k": 0}, "k 0 of 4 latents"),
        ({"latents": 4, "k": 2, "steps": 0}, "0 steps"),
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
