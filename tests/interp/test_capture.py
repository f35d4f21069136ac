"""What is read, of which tokens and heads, and that reading changes nothing."""

import pytest
import torch

from forge_core.batch import PADDING
from forge_interp.attention_scores import capture_qk
from forge_interp.captures import capture
from forge_interp.tap_names import InterpError
from forge_models.components.attentions import MLA
from forge_models.components.experts import MoEConfig
from forge_models.generation import generate
from forge_models.inner_values import listening
from forge_models.objectives import CrossEntropy
from models.variants import LATENT

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 1, 1, 2, 2, PADDING, PADDING]], dtype=torch.int32)


def everything(model, rows, **arguments):
    seen = {}
    with torch.no_grad(), listening(lambda name, x: seen.update({name: x.clone()})):
        model(rows, **arguments)
    return seen


def test_values_come_by_token_with_heads_behind(make, tokens):
    model, rows = make(moe=MoEConfig(experts=4, ffn_dim=16, top_k=2), kv_heads=2), tokens(2, 8)
    plain, logits = everything(model, rows), model(rows)
    with torch.no_grad(), capture(model, "*") as seen:
        assert torch.equal(model(rows), logits)
    assert set(seen) == set(plain)
    for name, value in plain.items():
        whole = value.unflatten(0, (2, 8)) if "router" in name else value
        assert torch.equal(seen[name], whole.transpose(1, 2) if whole.dim() == 4 else whole), name
    assert torch.equal(seen["blocks.0.attn.hook_rot_k"], plain["blocks.0.attention.k"].transpose(1, 2))
    assert seen["blocks.0.attention.k"].shape == (2, 8, 2, 8)
    assert torch.equal(seen["logits"], logits)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (3, lambda x: x[:, [3]]),
        ([5, 0, -1], lambda x: x[:, [5, 0, 7]]),
        ("last", lambda x: x[:, -1:]),
        ("mean", lambda x: x.mean(1, keepdim=True)),
        (slice(2, 7, 2), lambda x: x[:, 2:7:2].flatten(0, 1)),
    ],
)
def test_positions(make, tokens, positions, expected):
    model, rows = make(), tokens(2, 8)
    plain = everything(model, rows)["blocks.1.residual"]
    with capture(model, "blocks.1.residual", positions=positions) as seen:
        model(rows)
    torch.testing.assert_close(seen["blocks.1.residual"], expected(plain), rtol=0, atol=1e-7 if positions == "mean" else 0)


def test_padding_and_other_documents_are_left_out(make, tokens):
    model, rows = make(), tokens(2, 8)
    plain = everything(model, rows, documents=DOCUMENTS)["blocks.1.residual"]
    with (
        capture(model, "blocks.1.residual") as every,
        capture(model, "blocks.1.residual", positions="last") as last,
        capture(model, "blocks.1.residual", documents=[1]) as first,
        capture(model, "residual", positions="mean") as mean,
    ):
        model(rows, documents=DOCUMENTS)
    assert torch.equal(every["blocks.1.residual"], plain[DOCUMENTS != PADDING])
    assert torch.equal(last["blocks.1.residual"], torch.stack([plain[0, 7:8], plain[1, 5:6]]))
    assert torch.equal(first["blocks.1.residual"], torch.cat([plain[0, 3:7], plain[1, 2:4]]))
    assert first.tokens[0].tolist() == [[0, 3], [0, 4], [0, 5], [0, 6], [1, 2], [1, 3]]
    stream = everything(model, rows, documents=DOCUMENTS)["residual"]
    torch.testing.assert_close(mean["residual"][1, 0], stream[1, :6].mean(0))


def test_the_last_token_of_each_word(make, tokens):
    model, rows = make(), tokens(2, 8)
    words = torch.tensor([[0, 0, 1, 2, 2, 2, -1, 3], [4, 4, 4, 4, 4, 4, 4, 4]])
    plain = everything(model, rows)["blocks.1.residual"]
    with capture(model, "blocks.1.residual", positions="last_of_word", words=words) as seen:
        model(rows)
        assert seen.tokens[0].tolist() == [[0, 1], [0, 2], [0, 5], [0, 7], [1, 7]]
        assert torch.equal(seen["blocks.1.residual"], torch.cat([plain[0, [1, 2, 5, 7]], plain[1, 7:]]))
        model(rows, documents=DOCUMENTS)  # a word ends with its document, and padding holds none
        assert seen.tokens[1].tolist() == [[0, 1], [0, 2], [0, 5], [0, 7], [1, 1], [1, 3], [1, 5]]
    with (
        pytest.raises(InterpError, match="do not fit the tokens"),
        capture(model, "norm", positions="last_of_word", words=words[:, :5]),
    ):
        model(rows)


def test_heads_and_layers(make, tokens):
    model, rows = make(layers=3), tokens(2, 8)
    plain = everything(model, rows)
    with capture(model, "attention.heads", layers=[0, -1], heads=[3, 1], positions="last") as seen:
        model(rows)
    assert list(seen) == ["blocks.0.attention.heads", "blocks.2.attention.heads"]
    expected = plain["blocks.2.attention.heads"].transpose(1, 2)[:, -1:, [3, 1]]
    assert torch.equal(seen["blocks.2.attention.heads"], expected)


def test_what_is_not_there_is_refused_before_the_forward(make, tokens):
    model, rows, ran = make(), tokens(2, 8), []
    model.embed.register_forward_pre_hook(lambda _, given: ran.append(1) if given[0].device.type == "cpu" else None)

    def refused(match, names="blocks.0.attention.k", documents=None, **options):
        with pytest.raises(InterpError, match=match), capture(model, names, **options):
            model(rows, documents=documents)

    refused("head 2 of blocks.0.attention.k does not exist: it has 2", heads=[2])
    refused("head -1", heads=[-1])
    refused("blocks.0.residual has no heads", names="blocks.0.residual", heads=[0])
    refused("heads is empty", heads=[])
    refused("position 8 is beyond the 8 tokens", positions=[1, 8])
    refused("position -9 is beyond", positions=-9)
    refused("begin behind the 8 tokens", positions=slice(8, None))
    refused("ends behind its start", positions=slice(5, 2))
    refused("positions is an empty list", positions=[])
    refused("positions 'first'", positions="first")
    refused("words go with positions", words=torch.zeros(2, 8))
    refused("every 0", every=0)
    with pytest.raises(InterpError, match=r"documents \[7\] are not in"), capture(model, "norm", documents=[0, 7]):
        model(rows, documents=DOCUMENTS)
    with pytest.raises(InterpError, match="this forward has none"), capture(model, "norm", documents=[0]):
        model(rows)
    with pytest.raises(InterpError, match="a row has no token"), capture(model, "norm", positions="mean", documents=[2]):
        model(rows, documents=torch.tensor([[2] * 8, [0] * 8]))
    with pytest.raises(InterpError, match="are padding"), capture(model, "norm", positions=[6, 7]):
        model(rows[1:], documents=DOCUMENTS[1:])
    assert not ran
    model(rows)  # nothing was left behind
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_value_that_was_not_passed_is_named(make, tokens):
    model, rows = make(), tokens(2, 8)
    with capture(model, ["logits", "norm"]) as seen:
        with pytest.raises(InterpError, match="logits was not passed"):
            seen["logits"]
        model(rows, labels=rows, objective=CrossEntropy().build())
    with pytest.raises(InterpError, match="it made a loss and no logits, or it had no images"):
        seen["logits"]
    with pytest.raises(InterpError, match="residual was not captured; captured: norm, logits"):
        seen["residual"]


def test_copies_are_of_their_own_and_graphs_give_gradients(make, tokens):
    model, rows = make(), tokens(2, 8)
    with capture(model, "blocks.1.residual") as copied, capture(model, "blocks.1.residual", keep="graph") as live:
        loss = model(rows, labels=rows, objective=CrossEntropy().build()).sum
    assert not copied["blocks.1.residual"].requires_grad
    (gradient,) = torch.autograd.grad(loss, live["blocks.1.residual"])
    assert gradient.abs().max() > 0
    with capture(model, "attention.q", layers=[1], keep="graph") as live_q:
        loss = model(rows, labels=rows, objective=CrossEntropy().build()).sum
    (gradient,) = torch.autograd.grad(loss, live_q["blocks.1.attention.q"])
    assert gradient.shape == (2, 8, 4, 8)
    assert gradient[:, 1:].abs().max() > 0  # the first query sees one key
    with pytest.raises(InterpError, match="choose among the gradients"), capture(model, "norm", keep="graph", positions=[1]):
        pass
    with torch.no_grad():
        live["blocks.1.residual"].zero_()
    assert copied["blocks.1.residual"].abs().max() > 0


def test_every_second_forward(make, tokens):
    model = make()
    with capture(model, "norm", every=2) as seen:
        for seed in range(5):
            model(tokens(1, 4, seed=seed))
    assert len(seen.each("norm")) == len(seen.tokens) == 3
    with capture(model, "norm") as last:
        model(tokens(1, 4, seed=4))
    assert torch.equal(seen["norm"], last["norm"])
    seen.clear()
    assert not seen.each("norm")


def test_another_model_and_another_thread_are_not_heard(make, tokens):
    from threading import Thread

    model, other, rows = make(), make(seed=1), tokens(2, 8)
    with capture(model, "norm", positions=[7]) as seen:
        thread = Thread(target=model, args=(rows[:, :3],))  # position 7 would be refused
        thread.start()
        thread.join()
        model(rows)
        other(rows)
    assert len(seen.each("norm")) == 1
    assert torch.equal(seen["norm"], everything(model, rows)["norm"][:, 7:])
    with pytest.raises(InterpError, match="the model was not called as a whole"), capture(model, "blocks.0.residual"):
        model.hidden_states(rows, model.new_cache(2, 8))


@pytest.mark.parametrize("latent", [False, True])
def test_generation_is_read_token_by_token(make, latent):
    model = make(**({"kv_heads": None, "attention": MLA(**LATENT)} if latent else {}))
    prompts = [[5, 17, 3, 60], [9, 2]]
    plain = generate(model, prompts, max_tokens=3)
    with capture(model, ["blocks.1.residual", "norm"]) as seen, capture(model, "blocks.1.residual", positions=[4, 5]) as later:
        assert generate(model, prompts, max_tokens=3) == plain
    assert [tuple(one.shape[:-1]) for one in seen.each("blocks.1.residual")] == [(6,), (2, 1), (2, 1)]  # padding is not read
    assert seen.tokens[0].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]]
    assert [one.shape[1] for one in seen.each("norm")] == [1, 1, 1]
    whole = everything(model, torch.tensor([prompts[0] + plain[0][:2]]))
    first, *later_rows = seen.each("blocks.1.residual")
    torch.testing.assert_close(
        torch.cat([first[:4], *(one[0] for one in later_rows)]), whole["blocks.1.residual"][0], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(torch.cat([one[0] for one in seen.each("norm")]), whole["norm"][0, 3:], rtol=1e-5, atol=1e-5)
    # Places are those of each row's text: the second row is two tokens behind.
    assert [len(one) for one in later.each("blocks.1.residual")] == [0, 1, 1]
    with capture(model, "norm", positions="last") as last:
        generate(model, prompts, max_tokens=1)
    shorter = everything(model, torch.tensor([prompts[1]]))
    torch.testing.assert_close(last["norm"][1], shorter["norm"][0, -1:], rtol=1e-5, atol=1e-5)
    if latent:
        refused = pytest.raises(InterpError, match=r"holds all 5 tokens of a cache.*attention.latent")
        with refused, capture(model, "attention.k", layers=[0]):
            generate(model, prompts, max_tokens=3)
    with pytest.raises(InterpError, match="count from 0"), capture(model, "norm", positions=[-2]):
        generate(model, prompts, max_tokens=1)


def test_trials_e4_padding_of_prompts_and_rows_that_have_stopped_are_not_read(make):
    """Each row of a batch gives what it gives alone: the mean, every token, and the value that an edit puts in their place."""
    model, name = make(), "blocks.0.residual_after"
    prompts = [[3, 1, 4, 1, 5, 9, 2], [8, 7], [6, 6, 6]]
    for prefill in (None, 2):
        for positions in ("mean", "all"):
            with capture(model, name, positions=positions) as together:
                generate(model, prompts, max_tokens=1, prefill=prefill)
            if positions == "mean" and prefill is None:
                for row, prompt in enumerate(prompts):
                    with capture(model, name, positions="mean") as alone:
                        generate(model, [prompt], max_tokens=1)
                    torch.testing.assert_close(together[name][row], alone[name][0], rtol=1e-4, atol=1e-6)
            if positions == "all":
                read = sorted((row, at + 2 * part * (prefill is not None)) for part, one in enumerate(together.tokens)
                              for row, at in one.tolist())  # fmt: skip
                assert read == [(row, at) for row, prompt in enumerate(prompts) for at in range(len(prompt))]
    plain = generate(model, prompts, max_tokens=4)
    end = plain[1][1]  # the second row stops after two tokens, or earlier
    with capture(model, name) as seen:
        stopped = generate(model, prompts, max_tokens=4, eos=end)
    # The last new token of a row is not read, nor is what the model computes for a row that has stopped.
    assert sum(map(len, seen.tokens)) == sum(map(len, prompts)) + sum(len(row) - 1 for row in stopped)


def test_trials_e4_entropy_and_the_largest_score_leave_padding_out(make):
    model = make()
    tokens = torch.tensor([[5, 17, 3, 60], [9, 2, 0, 0]])
    documents = torch.tensor([[0, 0, 0, 0], [0, 0, PADDING, PADDING]], dtype=torch.int32)
    with torch.no_grad(), capture_qk(model) as padded:
        model(tokens, documents=documents)
    rows = []
    for row in ([5, 17, 3, 60], [9, 2]):
        with torch.no_grad(), capture_qk(model) as alone:
            model(torch.tensor([row]))
        rows.append(alone)
        entropy = padded.entropy(1)[len(rows) - 1]
        torch.testing.assert_close(entropy[:, : len(row)], alone.entropy(1)[0], rtol=1e-4, atol=1e-6)
        assert bool(entropy[:, len(row) :].isnan().all())
    expected = torch.stack([alone.max_logit(1) for alone in rows]).amax(0)
    torch.testing.assert_close(padded.max_logit(1), expected, rtol=1e-4, atol=1e-6)


def test_trials_e5_a_name_inside_of_a_block_is_refused_with_the_pattern_to_write(make):
    refused = pytest.raises(InterpError, match=r"'attention\.q' is a name inside of a block; write 'blocks\.\*\.attention\.q'")
    with refused, capture(make(), "attention.q", heads=[0]):
        pass
