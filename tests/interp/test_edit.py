"""Edits against the same change made by hand, in forwards, training and generation; and that nothing stays behind."""

from functools import partial

import pytest
import torch

from forge_interp.captures import capture
from forge_interp.edits import add, edit, mean, patch, project_out, replace, zero
from forge_interp.tap_names import InterpError
from forge_models.components.attentions import MLA
from forge_models.components.experts import MoEConfig
from forge_models.generation import generate
from forge_models.inner_values import listening
from forge_models.objectives import CrossEntropy
from models.variants import LATENT


def by_hand(model, rows, name, change):
    """Logits with `change` of the value as a block passes it."""
    with torch.no_grad(), listening(lambda at, x: change(x.clone()) if at == name else None):
        return model(rows)


def edited(model, rows, name, how, **options):
    with torch.no_grad(), edit(model, name, how, **options):
        return model(rows)


def test_zeros_of_one_head_are_zeros_in_the_output_projection(make, tokens):
    model, rows = make(spread=5.0), tokens(2, 8)
    found = edited(model, rows, "blocks.1.attn.hook_z", zero(), heads=[2])
    with torch.no_grad():
        model.blocks["1"].attention.o_proj.weight[:, 16:24] = 0
    torch.testing.assert_close(found, model(rows), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("how", "change", "by_token"),
    [
        (zero(), lambda x: x * 0, True),
        (add(torch.arange(32.0), 0.5), lambda x: x + torch.arange(32.0) * 0.5, True),
        (replace(torch.tanh), torch.tanh, True),
        (mean(), lambda x: x.mean((0, 1)).expand_as(x), False),
        (mean(torch.arange(32.0)), lambda x: torch.arange(32.0).expand_as(x), True),
        (patch(torch.ones(1, 8, 32)), torch.ones_like, True),
    ],
)
def test_each_edit_is_the_change_by_hand(make, tokens, how, change, by_token):
    model, rows = make(spread=5.0), tokens(2, 8)
    found = edited(model, rows, "blocks.1.residual", how)
    torch.testing.assert_close(found, by_hand(model, rows, "blocks.1.residual", change))
    assert not torch.allclose(found, model(rows))

    def at_two(x):
        x[:, [2, 5]] = change(x[:, :8])[:, [2, 5]]
        return x

    if by_token:  # a mean is over the tokens that are meant
        some = edited(model, rows, "blocks.1.residual", how, positions=[2, 5])
        torch.testing.assert_close(some, by_hand(model, rows, "blocks.1.residual", at_two))
        assert torch.equal(some[:, :2], model(rows)[:, :2])


def test_a_mean_is_over_the_tokens_that_are_meant(make, tokens):
    model, rows = make(spread=5.0), tokens(2, 8)

    def change(x):
        x[:, [2, 5]] = x[:, [2, 5]].mean((0, 1))
        return x

    found = edited(model, rows, "blocks.1.residual", mean(), positions=[2, 5])
    torch.testing.assert_close(found, by_hand(model, rows, "blocks.1.residual", change))


def test_a_direction_is_projected_out(make, tokens):
    model, rows = make(spread=5.0), tokens(2, 8)
    directions = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    directions[2] = directions[0] * 2 - directions[1]  # two directions, named by three
    with edit(model, "blocks.1.residual", project_out(directions)), capture(model, "blocks.1.residual") as seen:
        model(rows)
    left = seen["blocks.1.residual"] @ directions.T
    assert left.abs().max() < 1e-4
    with capture(model, "blocks.1.residual") as plain:
        model(rows)
    gone = plain["blocks.1.residual"] - seen["blocks.1.residual"]
    assert torch.linalg.matrix_rank(gone.flatten(0, 1).double(), atol=1e-4) == 2
    with pytest.raises(InterpError, match="zero"):
        project_out(torch.zeros(32))
    with pytest.raises(InterpError, match=r"of width 5 do not fit blocks.1.residual, of width 32"):
        edited(model, rows, "blocks.1.residual", project_out(torch.ones(5)))


def test_patching_all_of_the_stream_gives_the_other_run(make, tokens):
    model, rows, others = make(spread=5.0), tokens(2, 8), tokens(2, 8, seed=5)
    with capture(model, "blocks.*.residual") as clean:
        expected = model(others)
    assert torch.equal(edited(model, rows, "blocks.1.residual", patch(clean)), expected)
    # Causal: what was patched at position 5 changes nothing before.
    some = edited(model, rows, "blocks.1.residual", patch(clean), positions=[5])
    assert torch.equal(some[:, :5], model(rows)[:, :5])
    assert not torch.allclose(some[:, 5:], model(rows)[:, 5:])


def test_queries_and_keys_are_edited_as_they_enter_the_scores(make, tokens):
    """Zero queries see all keys alike: each output is the mean of the values before it."""
    model, rows = make(spread=5.0, layers=1), tokens(1, 6)
    with edit(model, "attention.q", zero(), layers=[0]), capture(model, ["*.hook_z", "*.hook_v"]) as seen:
        model(rows)
    values = seen["blocks.0.attn.hook_v"].repeat_interleave(2, 2)
    means = values.cumsum(1) / torch.arange(1, 7)[:, None, None]
    torch.testing.assert_close(seen["blocks.0.attn.hook_z"], means)


def test_an_edit_inside_another_one_works_on_what_that_made(make, tokens):
    model, rows = make(), tokens(1, 4)
    twice, thrice = add(torch.ones(32)), replace(lambda x: x * 3)
    with (
        capture(model, "norm") as before,
        edit(model, "norm", twice),
        edit(model, "norm", thrice),
        capture(model, "norm") as after,
    ):
        model(rows)
    torch.testing.assert_close(after["norm"], (before["norm"] + 1) * 3)


def test_routers_are_edited_by_their_logits(make, tokens):
    model, rows = make(moe=MoEConfig(experts=4, ffn_dim=16, top_k=2)), tokens(2, 8)
    wanted = torch.tensor([9.0, -9.0, -9.0, 9.0])
    with edit(model, "router.logits", add(wanted, 100.0), layers=[1]), capture(model, "router.experts", layers=[1]) as seen:
        model(rows)
    assert seen["blocks.1.router.experts"].sort(-1).values.unique(dim=1).tolist() == [[[0, 3]], [[0, 3]]]
    with pytest.raises(InterpError, match=r"router.experts can be captured, not edited"), edit(model, "*experts", zero()):
        pass
    with edit(model, "router.weights", zero(), layers=[1]), capture(model, "mlp.output", layers=[1]) as none:
        model(rows)
    assert not none["blocks.1.mlp.output"].any()


def test_training_sees_the_edit_and_its_gradient(make, tokens):
    model, twin, rows = make(), make(), tokens(2, 8)
    objective = CrossEntropy().build()
    with edit(model, "blocks.0.attention.added", zero()):
        model(rows, labels=rows, objective=objective).sum.backward()
    assert not model.blocks["0"].attention.o_proj.weight.grad.any()
    with torch.no_grad():
        twin.blocks["0"].attention.o_proj.weight.zero_()
    twin(rows, labels=rows, objective=objective).sum.backward()
    torch.testing.assert_close(model.embed.weight.grad, twin.embed.weight.grad)


def test_a_block_that_runs_again_in_the_backward_is_refused(make, tokens):
    model, rows = make(), tokens(1, 4)
    block = model.blocks["0"]
    block.forward = partial(block.forward)
    with edit(model, "norm", zero()):
        with pytest.raises(InterpError, match=r"blocks.0 has a wrapped forward.*not edited"):
            model(rows)
        with torch.no_grad():
            assert not model(rows).any()
    with pytest.raises(InterpError, match="wrapped"), capture(model, "norm", keep="graph"):
        model(rows)


@pytest.mark.parametrize("latent", [False, True])
def test_generation_is_steered(make, latent):
    model = make(**({"kv_heads": None, "attention": MLA(**LATENT)} if latent else {}))
    prompts, vector = [[5, 17, 3, 60], [9, 2]], torch.randn(32, generator=torch.Generator().manual_seed(3))
    plain = generate(model, prompts, max_tokens=6)
    with edit(model, "residual_after", add(vector, 0.3), layers=[0]):
        steered = generate(model, prompts, max_tokens=6)
        chunked = generate(model, prompts, max_tokens=6, prefill=2)
    assert steered != plain
    assert chunked == steered
    # Without a cache: every token is edited at its place.
    for prompt, made in zip(prompts, steered, strict=True):
        row = list(prompt)
        for token in made:
            with torch.no_grad(), edit(model, "residual_after", add(vector, 0.3), layers=[0]):
                assert int(model(torch.tensor([row]))[0, -1].argmax()) == token
            row.append(token)
    with edit(model, "norm", add(vector, 100.0), positions=slice(5, None)):
        later = generate(model, prompts, max_tokens=6)
    forced = int((model.head.weight @ vector).argmax())
    assert later[0][2:] == [forced] * 4 and later[0][:2] == plain[0][:2]
    assert later[1][4:] == [forced] * 2 and later[1][:4] == plain[1][:4]
    assert generate(model, prompts, max_tokens=6) == plain


def test_wrong_edits_are_named_and_leave_nothing(make, tokens):
    model, rows = make(), tokens(1, 4)
    expected = model(rows)
    with pytest.raises(InterpError, match=r"norm: the edit made \(1, 4, 5\)"):
        edited(model, rows, "norm", replace(lambda x: x[..., :5]))
    with pytest.raises(InterpError, match=r"norm: a value of shape \(7,\) cannot take the place of \(1, 4, 32\)"):
        edited(model, rows, "norm", add(torch.ones(7)))
    with pytest.raises(InterpError, match="'mean' can be captured, not edited"):
        edited(model, rows, "norm", zero(), positions="mean")
    with pytest.raises(InterpError, match="head 9"):
        edited(model, rows, "attention.q", zero(), layers=[0], heads=[9])
    with pytest.raises(ZeroDivisionError):
        edited(model, rows, "norm", replace(lambda _: 1 / 0))
    assert not model._forward_pre_hooks
    assert torch.equal(model(rows), expected)


def test_bf16_stays_bf16(make, tokens):
    model, rows = make(dtype=torch.bfloat16), tokens(1, 4)
    with edit(model, "blocks.1.residual", replace(lambda x: x.float() + 1)), capture(model, "residual_after", layers=[1]) as seen:
        assert model(rows).dtype == torch.bfloat16
    assert seen["blocks.1.residual_after"].dtype == torch.bfloat16
