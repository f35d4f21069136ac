"""The decoder against LlamaForCausalLM of transformers: logits, loss and every gradient."""

import pytest
import torch

from forge_models.components.layers import RMSNormConfig
from forge_models.objectives import CrossEntropy
from forge_models.shape import Rope
from harness.closeness import wide

NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
INSIDE = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
}


def llama_name(name: str) -> str:
    """Name of the same tensor in transformers."""
    if name in NAMES:
        return NAMES[name]
    _, layer, part, rest = name.split(".", 3)
    return f"model.layers.{layer}.{INSIDE[part]}.{rest}"


def llama(model):
    """A LlamaForCausalLM with the weights of `model`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.shape
    twin = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_length,
            rms_norm_eps=config.norm.eps,
            rope_theta=config.rope.theta,
            tie_word_embeddings=config.tied_embeddings,
            attn_implementation="eager",
        )
    )
    with torch.no_grad():
        parameters = dict(twin.named_parameters())
        for name, value in model.named_parameters():
            parameters.pop(llama_name(name)).copy_(value)
    assert not parameters
    return twin


CASES = {
    "grouped": {},
    "multi_head": {"kv_heads": None},
    "multi_query": {"kv_heads": 1},
    "tied": {"tied_embeddings": True},
    "other_numbers": {"head_dim": 12, "rope": Rope(theta=500.0), "norm": RMSNormConfig(eps=1e-3), "layers": 3},
}


@pytest.mark.parametrize("case", CASES)
@wide()
def test_logits_loss_and_gradients_equal_llama(make, tokens, case):
    # Weights are spread to standard deviations of about 0.2: attention is far from uniform then.
    model = make(dtype=torch.float64, spread=10.0, **CASES[case])
    with torch.no_grad():  # norms must not be all ones, or a norm in the wrong place would pass
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel()))
    twin = llama(model)
    rows = tokens(3, 17)
    inputs, labels = rows[:, :-1], rows[:, 1:].clone()
    labels[0, 3:7] = -100

    expected = twin(inputs).logits
    torch.testing.assert_close(model(inputs), expected, rtol=0, atol=1e-11)

    terms = model(inputs, labels=labels, objective=CrossEntropy().build())
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    assert int(terms.tokens) == (labels != -100).sum()
    torch.testing.assert_close(terms.sum / terms.tokens, loss, rtol=1e-12, atol=0)

    (terms.sum / terms.tokens).backward()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for name, parameter in model.named_parameters():
        other = gradients.pop(llama_name(name))
        torch.testing.assert_close(parameter.grad, other, rtol=0, atol=1e-11 * float(other.abs().max()), msg=name)
    assert not gradients


@wide()
def test_given_positions_turn_as_in_llama(make, tokens):
    model = make(dtype=torch.float64, spread=10.0)
    positions = torch.tensor([[0, 1, 2, 0, 1, 9, 10, 40], [3, 1, 4, 1, 5, 9, 2, 6]])
    expected = llama(model)(tokens(2, 8), position_ids=positions).logits
    ours = model(tokens(2, 8), positions=positions.int())
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)
    assert float((ours - model(tokens(2, 8))).detach().abs().max()) > 1e-2
