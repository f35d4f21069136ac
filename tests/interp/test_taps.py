"""Every tap has a name, and an alias or a reason why it has none; without a listener a tap costs nothing."""

import time

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from forge_interp.captures import capture
from forge_interp.tap_names import INSIDE, OUTSIDE, InterpError, by_token, choose, known, taps
from forge_models.components.attentions import GQA, MLA
from forge_models.components.decoder import DecoderConfig, MTPConfig
from forge_models.components.experts import MoEConfig
from forge_models.inner_values import is_listening, listening, tap
from forge_models.objectives import CrossEntropy
from models.conftest import fill
from models.variants import LATENT, SIZES, VARIANTS


def built(fields):
    model = DecoderConfig(**(SIZES | fields)).build()
    fill(model, model.specs(), 0)
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_model_passes_is_listed_with_its_shape_and_has_an_alias_or_a_reason(name):
    model, seen = built(VARIANTS[name]), {}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    listed = taps(model)
    with torch.no_grad(), listening(lambda name, x: seen.update({name: x})):
        model(torch.arange(10).view(2, 5))
    assert list(listed) == list(seen)
    for path, value in seen.items():
        entry = known(path)
        assert entry is not None, path
        assert bool(entry.alias) != bool(entry.why), path
        found = by_token(value, entry.dims, 2)
        assert found.shape[:2] == (2, 5), path
        assert (listed[path].shape, listed[path].dtype) == (found.shape[2:], found.dtype), path
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_every_name_of_the_table_is_passed_by_some_model():
    seen = set()
    for fields in [*VARIANTS.values(), {"mtp": MTPConfig(depth=2)}, {"moe": MoEConfig(experts=4, ffn_dim=16, shared=1)}]:
        seen |= set(taps(built(fields)))
    assert {name for name in OUTSIDE if name not in seen} == set()
    missing = [name for name in INSIDE if not any(path.endswith(f".{name}") for path in seen)]
    assert missing == []


def test_modules_for_multi_token_prediction_are_listed_and_heard(make, tokens):
    model = make(mtp=MTPConfig(depth=2), moe=MoEConfig(experts=4, ffn_dim=16))
    listed = taps(model)
    inside = {name.removeprefix("mtp.depths.2.") for name in listed if name.startswith("mtp.depths.2.")}
    assert inside >= {"residual", "attention.q", "router.logits", "residual_after", "norm"}
    assert all(not one.alias for name, one in listed.items() if name.startswith("mtp."))
    assert listed["blocks.1.attention.q"].alias == "blocks.1.attn.hook_rot_q"
    assert listed["norm"].alias == "unembed.hook_in"


def test_names_are_chosen_by_path_alias_pattern_and_layer(make):
    found = taps(make(layers=3))
    assert list(choose(found, "blocks.1.attn.hook_rot_q")) == ["blocks.1.attention.q"]
    assert list(choose(found, ["*.hook_resid_pre"])) == [f"blocks.{layer}.residual" for layer in range(3)]
    assert list(choose(found, ["residual_mid", "attention.v"], layers=[-1, 0])) == [
        *("blocks.0.attention.v", "blocks.0.residual_mid", "blocks.2.attention.v", "blocks.2.residual_mid")
    ]
    assert list(choose(found, "residual")) == ["residual"]
    with pytest.raises(InterpError, match=r"'blocks.1.atention.q' matches no inner value.*blocks.1.attention.q"):
        choose(found, "blocks.1.atention.q")
    with pytest.raises(InterpError, match="layer 3 does not exist: this model has 3, from 0 to 2"):
        choose(found, "attention.q", layers=[3])
    with pytest.raises(InterpError, match="layer -4"):
        choose(found, "attention.q", layers=[-4])
    with pytest.raises(InterpError, match="empty"):
        choose(found, [])
    with pytest.raises(InterpError, match="'norm' matches no inner value of this model in layers 0"):
        choose(found, "norm", layers=[0])


def test_the_list_says_what_a_token_costs(make):
    found = taps(make(dtype=torch.bfloat16))
    assert found["blocks.0.residual"].bytes_per_token == 32 * 2
    assert (found["blocks.0.attention.k"].shape, found["blocks.0.attention.k"].heads) == ((2, 8), 2)
    assert found["logits"].bytes_per_token == 97 * 2
    assert found["blocks.0.residual"].heads is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("experts", [False, True])
def test_graphs_and_bits_are_those_without_taps(make, tokens, experts):
    fields = {"moe": MoEConfig(experts=4, ffn_dim=16, shared=1, kernel="loop")} if experts else {"attention": GQA(qk_norm="full")}
    model, rows = make(**fields), tokens(2, 9)
    arguments = {"labels": rows, "objective": CrossEntropy().build()}
    plain = model(rows, **arguments).sum
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    for block in model.blocks.values():
        block.compile(backend=counter, fullgraph=True)
    model(rows, **arguments)
    graphs, operators = counter.frame_count, counter.op_count
    assert 1 <= graphs <= 2
    with capture(model, "*") as seen:
        heard = model(rows, **arguments).sum
    assert torch.equal(heard, plain)
    assert len(seen.each("blocks.0.residual")) == 1
    model(rows, **arguments)
    assert (counter.frame_count, counter.op_count) == (graphs, operators)
    nodes = [node for graph in counter.graphs for node in graph.graph.nodes]
    assert not [node for node in nodes if "tap" in str(node.target)]


def test_a_tap_without_a_listener_is_the_value_and_takes_no_time():
    x = torch.ones(3)
    assert tap("q", x) is x
    begun = time.perf_counter()
    for _ in range(20_000):
        tap("q", x)
    # A block of the smallest preset takes a millisecond; its taps together must not be seen in it.
    assert (time.perf_counter() - begun) / 20_000 < 20e-6


def test_listeners_nest_and_end(make, tokens):
    model, rows, heard = make(), tokens(1, 4), []

    def outer(name, x):
        heard.append(("outer", name))
        return torch.zeros_like(x) if name == "norm" else None

    def inner(name, x):
        heard.append(("inner", name))
        if name == "norm":
            assert not x.any()
        if name == "blocks.1.residual":
            raise KeyError("stop")

    with listening(outer):
        with pytest.raises(KeyError), listening(inner):
            model(rows)
        assert heard[-2:] == [("outer", "blocks.1.residual"), ("inner", "blocks.1.residual")]
        heard.clear()
        assert is_listening(outer)
        assert not is_listening(inner)
        model(rows)
        assert {who for who, _ in heard} == {"outer"}
    assert not is_listening(outer)
    assert torch.equal(model(rows), model(rows))


def test_a_part_of_a_model_and_a_sharded_one_are_refused(make):
    model = make()
    model.head = None
    with pytest.raises(InterpError, match="no `head`: it is one part of a pipeline"):
        taps(model)
    model = make()
    model.norm.weight.placements = "(Shard(dim=0),)"
    with pytest.raises(InterpError, match=r"norm.weight is sharded \(\(Shard"):
        taps(model)


def test_latent_attention_has_a_latent_and_keys_of_every_head(make):
    found = taps(make(kv_heads=None, attention=MLA(**LATENT)))
    assert found["blocks.0.attention.latent"].shape == (14,)
    assert found["blocks.0.attention.k"].shape == (4, 10)
    assert found["blocks.0.attention.heads"].shape == (4, 12)
