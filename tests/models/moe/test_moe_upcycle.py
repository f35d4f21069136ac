"""A dense model turned into one with experts computes the same function at the start; what cannot is refused."""

from dataclasses import replace

import pytest
import torch

from forge_core.errors import ForgeError
from forge_core.protocols.weights import StoredTensor, WeightsInfo
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import HashConfig, MoEConfig, NormedTopKConfig, SigmoidTopKConfig, SoftmaxTopKConfig
from forge_models.components.layers import GELU
from forge_models.hf.streamed_forward import logits_of
from forge_models.upcycle import Upcycled
from models.conftest import TINY


class Held:
    """`Weights` of a module in memory."""

    def __init__(self, module, dtype="float32", **fields):
        self.model, self.facts = DecoderConfig(**(TINY | fields)), WeightsInfo(step=7, origin="here", family="llama")
        self._held = {name: p.detach().to(getattr(torch, dtype)) for name, p in module.named_parameters()}
        self.tensors = {name: StoredTensor(tuple(p.shape), dtype) for name, p in self._held.items()}

    def read(self, names):
        return {name: self._held[name] for name in names}

    def box(self, name, offset, extent):
        raise NotImplementedError


PRESERVING = {
    "copies": MoEConfig(experts=4, top_k=2),
    "one of four": MoEConfig(experts=4, top_k=1),
    "shared too": MoEConfig(experts=4, top_k=2, shared=3, ffn_dim=48, first_dense=1),
    "shared with a gate": MoEConfig(experts=4, top_k=2, shared=1, shared_gate=True),
    "sigmoid, scaled": MoEConfig(experts=8, top_k=2, router=SigmoidTopKConfig(scaling=2.5, n_group=4, topk_group=2)),
    "fine-grained": MoEConfig(experts=12, top_k=6, ffn_dim=16),
    "fine-grained, sigmoid": MoEConfig(experts=8, top_k=4, ffn_dim=24, every=2, router=SigmoidTopKConfig(scaling=0.7)),
    "by hash": MoEConfig(experts=4, top_k=2, router=HashConfig()),
}


@pytest.mark.parametrize("name", PRESERVING)
@pytest.mark.parametrize("fields", [{}, {"mlp": GELU()}], ids=["gated", "plain"])
def test_the_function_is_preserved(make, tokens, name, fields):
    dense = Held(make(spread=8.0, **fields), **fields)
    sparse = Upcycled(dense, PRESERVING[name])
    rows = tokens(2, 13)
    expected = logits_of(dense, rows, torch.float64)
    torch.testing.assert_close(
        logits_of(sparse, rows, torch.float64), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max())
    )
    assert sparse.model == replace(dense.model, moe=PRESERVING[name], ffn_dim=48)
    assert {name: entry.shape for name, entry in sparse.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in sparse.model.build().state_dict().items()
    }
    assert sparse.facts.step == 7


def test_numbers_of_blocks_are_kept(make):
    module = make(layer_scalar=True)
    dense = Held(module, layer_scalar=True)
    name = "blocks.1.scalar"
    dense._held[name], dense.tensors[name] = torch.tensor([2.5]), StoredTensor((1,), "float32")
    sparse = Upcycled(dense, MoEConfig(experts=4))
    assert torch.equal(sparse.read([name])[name], dense._held[name])


def test_noise_makes_experts_differ_by_what_was_asked(make):
    dense = Held(make())
    plain, noisy = Upcycled(dense, MoEConfig(experts=4)), Upcycled(dense, MoEConfig(experts=4), noise=0.1)
    for matrix in ("gate_proj", "up_proj", "down_proj"):
        name = f"blocks.1.mlp.experts.{matrix}"
        before, after = plain.read([name])[name], noisy.read([name])[name]
        assert all(torch.equal(before[0], expert) for expert in before)
        added = (after - before).std(dim=(1, 2)) / before[0].std()
        torch.testing.assert_close(added, torch.full((4,), 0.1), rtol=0.1, atol=0)
        assert not torch.equal(after[0], after[1])
        assert torch.equal(after, noisy.read([name])[name])
        assert torch.equal(noisy.box(name, (1, 2, 0), (2, 3, 5)), after[1:3, 2:5, :5])


def test_the_dtype_stays(make):
    sparse = Upcycled(Held(make(), "bfloat16"), MoEConfig(experts=4, shared=1), noise=0.01)
    read = sparse.read(list(sparse.tensors))
    assert all(str(tensor.dtype) == f"torch.{sparse.tensors[name].dtype}" for name, tensor in read.items())
    assert {entry.dtype for entry in sparse.tensors.values()} == {"bfloat16"}
    assert {name: tuple(tensor.shape) for name, tensor in read.items()} == {n: e.shape for n, e in sparse.tensors.items()}


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        (MoEConfig(router=SoftmaxTopKConfig(normalize=False)), r"router\.normalize"),
        (MoEConfig(ffn_dim=20), "must divide the dense model's ffn_dim 48"),
        (MoEConfig(experts=9, top_k=2, ffn_dim=16), "top_k 2 must be a multiple of 3"),
        (MoEConfig(experts=8, top_k=3, ffn_dim=16), "experts 8 must be a multiple of 3"),
        (MoEConfig(experts=8, top_k=2, ffn_dim=24, router=HashConfig()), "cannot choose the"),
        (MoEConfig(experts=8, top_k=2, ffn_dim=24, router=SigmoidTopKConfig(n_group=8)), "whole copies of 2"),
        (MoEConfig(first_dense=2), "no layer experts"),
        (MoEConfig(shared=1, branch_norms=True), r"branch_norms = false"),
        (MoEConfig(router=NormedTopKConfig()), "choose router softmax_topk"),
    ],
)
def test_what_cannot_be_preserved_is_refused(make, moe, message):
    with pytest.raises(ForgeError, match=message):
        Upcycled(Held(make()), moe)


def test_only_dense_models_are_taken(make):
    with pytest.raises(ForgeError, match="is not a dense decoder"):
        Upcycled(Held(make(moe=MoEConfig()), moe=MoEConfig()), MoEConfig())
    assert DecoderConfig().moe is None


def test_biases_of_the_dense_model_are_refused(make):
    with pytest.raises(ForgeError, match="have biases"):
        Upcycled(Held(make(mlp=GELU(bias=True)), mlp=GELU(bias=True)), MoEConfig(experts=4))
