"""What must hold for every block component, ours of today and those that are registered later."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_models.generation import generate
from forge_models.objectives import CrossEntropy
from forge_parallel.model.plan import Plan
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, compare, measure
from models.variants import SIZES, VARIANTS

NO_BUFFERS = ("experts_hash", "experts_softmax_topk", "experts_with_a_gate_on_the_shared_one", "experts_with_biases_and_clamps")
NO_BUFFERS += ("experts_normed_topk", "experts_with_norms_of_branches", "experts_topk_sigmoid", "experts_with_weighted_inputs")
LATENTS = ("mla", "query_latent", "latent_without_positions", "indexed_mla", "indexer_in_warm_up", "streams_of_experts")
"""Variants with experts whose routers are balanced by nothing."""
every = pytest.mark.parametrize("name", VARIANTS)


@pytest.fixture
def build(make):
    """build(name) -> the variant with weights large enough that attention is far from uniform."""

    def build(name, **fields):
        model = make(**({"kv_heads": None, "spread": 8.0} | SIZES | VARIANTS[name] | fields))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():  # neither ones nor zeros, or a norm or bias in the wrong place would pass
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        return model

    return build


@every
def test_specs_are_complete_and_fit(name):
    config = DecoderConfig(**SIZES | VARIANTS[name])
    state = torch.get_rng_state()
    model = config.build()
    assert torch.equal(state, torch.get_rng_state()), "a constructor draws"
    specs, parameters, buffers = model.specs(), dict(model.named_parameters()), dict(model.named_buffers())
    assert bool(buffers) == (("experts_" in name and name not in NO_BUFFERS) or name == "scalars")
    assert specs.tensors.keys() == parameters.keys() | buffers.keys()
    assert all(len(specs.tensors[path].dims) == buffer.dim() for path, buffer in buffers.items())
    assert all(parameter.isnan().all() for parameter in parameters.values()), "filled by its constructor, and again later"
    head, kv_heads = config.shape.head_dim, config.shape.kv_heads
    sizes = {"embed": {48}, "heads": {6 * head}, "kv_heads": {kv_heads * head}, "ffn": {56}, "vocab": {101}}
    sizes |= {"ffn": {56, 24, 2 * 24}, "expert": {config.moe.experts}} if config.moe is not None else {}
    if name in ("gated_output", "keys_as_values"):
        sizes["heads"] = {6 * head, 6 * 2 * head}  # of outputs, and of queries with gates
    if name == "shared_keys_and_values":
        sizes["ffn"] = {56, 2 * 56}
    if name == "heads_of_global_layers":  # layer 1 has 2 heads of 14
        sizes |= {"heads": {6 * head, 6 * 14}, "kv_heads": {kv_heads * head, 2 * 14}}
    if name == "value_embeddings":
        sizes["heads"] = {6 * head, 6 * 2 * head}
        sizes["kv_heads"] = {2, 2 * head}
    if name == "value_embeddings_beside_recurrent_layers":
        sizes["heads"] |= {6}
        sizes["kv_heads"] |= {3}
    if name == "sinks":
        sizes["heads"] = {6, 6 * head}
    if name.startswith("compressed_"):
        sizes["heads"] = {6, 6 * head, 2 * 9}  # of sinks, of queries, and of groups of heads
    if name in LATENTS:
        sizes["heads"] = {6 * 10, 6 * 12, 6 * 18}  # of queries, values, and keys with values
    if "state_heads" in specs.units:
        sizes["state_heads"] = {6, 6 * 10, 3 * 7, 6 * 9}
    if name == "kimi_delta":
        sizes["state_heads"] = {6, 6 * 10}
    if name == "mamba2":
        sizes["state_heads"] = {6, 2 * 48, 6 * 128}
    if name == "grouped_states":
        sizes["state_heads"] = {6, 6 * 7, 3 * 9}
    for path, spec in specs.tensors.items():
        if path in buffers:
            continue
        assert len(spec.dims) == parameters[path].dim(), path
        assert spec.stacked == (spec.dims[0] == "expert"), path
        for size, dim in zip(parameters[path].shape, spec.dims, strict=True):
            assert dim is None or size in sizes[dim], path
        assert (spec.group == "vector") == (len(spec.dims) - spec.stacked == 1 or "_conv." in path), path
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in config.build().parameters())


@every
def test_module_specs_tell_the_shapes_that_flow(build, tokens, name):
    model = build(name)
    specs = model.specs()
    linear = {path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linear <= specs.modules.keys()
    fixed, seen = {"batch": 2, "sequence": 9, "embed": 48, "ffn": 56, "vocab": 101}, set()
    units = dict(specs.units)
    if model.shape.moe is not None or name == "shared_keys_and_values":
        del fixed["ffn"]  # of dense layers, experts and shared experts: multiples of one unit

    def check(path):
        def hook(module, inputs, output):
            spec = specs.modules[path]
            first = output[0] if isinstance(output, tuple) else output  # experts also return what they counted
            for tensor, dims in ((inputs[0], spec.inputs[0]), (first, spec.outputs[0])):
                assert tensor.dim() == len(dims), path
                for size, dim in zip(tensor.shape, dims, strict=True):
                    assert size == fixed[dim] if dim in fixed else dim is None or size % units[dim] == 0, path
            seen.add(path)

        return hook

    modules = dict(model.named_modules())
    for path in specs.modules:
        modules[path].register_forward_hook(check(path))
    model(tokens(2, 9, 101))
    assert seen == specs.modules.keys()


@every
def test_cached_equals_uncached(build, tokens, name):
    model, rows = build(name), tokens(2, 11, 101)
    with torch.no_grad():
        whole = model(rows)
        for chunks in ((11,), (1,) * 11, (4, 1, 6)):
            cache = model.new_cache(2, 11)
            found = torch.cat([model(part, cache=cache) for part in rows.split(chunks, dim=1)], 1)
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5 * max(1.0, float(whole.abs().max())), msg=str(chunks))


@every
def test_greedy_tokens_equal_those_without_a_cache(build, name):
    model, prompts = build(name), [[5, 6, 7, 8, 9, 10, 11], [1, 2]]
    found = generate(model, prompts, max_tokens=9, prefill=3)
    for prompt, row in zip(prompts, found, strict=True):
        ids = list(prompt)
        for token in row:
            with torch.no_grad():
                assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
            ids.append(token)


@every
def test_a_packed_document_equals_the_document_alone(build, tokens, name):
    model, row, lengths = build(name), tokens(1, 17, 101), (5, 1, 11)
    documents = torch.tensor([[number for number, length in enumerate(lengths) for _ in range(length)]])
    positions = torch.tensor([[place for length in lengths for place in range(length)]])
    with torch.no_grad():
        together = model(row, documents=documents.int(), positions=positions.int())
        alone = torch.cat([model(part) for part in row.split(lengths, dim=1)], 1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5 * max(1.0, float(alone.abs().max())))


class _Narrowing(TorchDispatchMode):
    """Refuses every operator that makes lower precision of fp64."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and result.dtype in (torch.float32, torch.bfloat16):
            assert not any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in args), function
        return result


@every
def test_fp64_stays_fp64(build, tokens, name):
    model, rows = build(name, dtype=torch.float64), tokens(2, 9, 101)
    with _Narrowing():
        terms = model(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy().build())
        terms.sum.backward()
    assert terms.sum.dtype == torch.float64
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.dtype == torch.float64, path
        assert float(parameter.grad.abs().max()) > 0, path


def _measure(case, layout):
    return measure(case, Plan.of([FullyShard()], Layout.parse(layout)), torch.device("cpu"))


@every
def test_sharded_equals_one_process(world, name):
    config = DecoderConfig(**SIZES | {"layers": 2} | VARIANTS[name])
    objective = CrossEntropy().build()
    case = Case(config.build, objective, AdamWConfig(lr=1e-2).build, 101, rows=4, micro_batch=2, silent=2, steps=1, state="fp64")
    whole = _measure(case, "1")
    # Filled exactly once: nothing is left as NaN, and every layout starts with the same bits.
    assert all(bool(tensor.isfinite().all()) for tensor in whole.initial.values())
    for found in world.run(_measure, 2, case, "dp2"):
        difference = compare(whole, found)
        assert difference.accepted("fp64"), difference


MINE = '''
from dataclasses import dataclass

from forge_core.component import Component


@dataclass(frozen=True, kw_only=True)
class MeanOfThePast(Component):
    """Each position gets the mean of itself and all before it."""

    strength: float = 1.0
    """Factor."""

    def build(self, context):
        import torch

        class Module(torch.nn.Module):
            def forward(module, x, turn, shared, cache=None):
                counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
                return self.strength * x.cumsum(1) / counts[:, None]

        return Module()


@dataclass(frozen=True, kw_only=True)
class Double(Component):
    """No parameters at all."""

    def build(self, context):
        import torch

        class Module(torch.nn.Module):
            def forward(self, x):
                return 2 * x

        return Module()
'''


def test_parts_from_a_plain_file_are_chosen_by_name(tmp_path, tokens):
    from forge_core.registry import Registry
    from forge_core.trust import trust_file
    from models.conftest import fill

    (tmp_path / "mine.py").write_text(MINE)
    registry = Registry()
    trust_file(tmp_path / "mine.py")
    attention = registry.load("forge.attentions", f"{tmp_path}/mine.py:MeanOfThePast")(strength=0.5)
    mlp = registry.load("forge.mlps", f"{tmp_path}/mine.py:Double")()
    model = DecoderConfig(dim=8, layers=1, heads=2, vocab_size=11, attention=attention, mlp=mlp).build()
    fill(model, model.specs(), 0)
    assert model.specs().tensors.keys() == {
        "embed.weight",
        "head.weight",
        "norm.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.mlp_norm.weight",
    }
    rows = tokens(1, 4, 11)
    normed = model.blocks["0"].attention_norm
    x = model.embed(rows)
    x = x + 0.5 * torch.stack([normed(x)[:, : t + 1].mean(1) for t in range(4)], 1)
    x = x + 2 * normed(x)  # both norms are ones
    torch.testing.assert_close(model(rows), model.head(model.norm(x)))
