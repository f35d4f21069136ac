"""The descriptions: defaults, cross-field rules, registration, and no torch."""

import subprocess
import sys

import pytest

from forge_core.component import Slot, fields_of
from forge_core.registry import GROUPS, Registry, installed
from forge_models.components.attentions import GQA, MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.layers import GELU, GeGLU, ReLU, ReLU2, RMSNormConfig, SwiGLU
from forge_models.shape import Rope

OURS = [entry for entry in installed() if entry.distribution == "forge-models"]


def test_what_is_offered():
    assert {(entry.group, entry.name) for entry in OURS} >= {
        ("forge.models", "decoder"),
        *(("forge.attentions", name) for name in ("gqa", "mla")),
        *(("forge.mlps", name) for name in ("swiglu", "geglu", "clamped_swiglu", "gelu", "relu", "relu2")),
        *(("forge.norms", name) for name in ("rmsnorm", "layernorm")),
        *(("forge.routers", name) for name in ("softmax_topk", "sigmoid_topk", "hash")),
        ("forge.objectives", "cross_entropy"),
    }


@pytest.mark.parametrize(
    "entry", [entry for entry in OURS if GROUPS[entry.group].build is not None], ids=lambda entry: entry.name
)
def test_every_field_is_documented(entry):
    for field in fields_of(Registry().load_entry(entry)):
        assert field.doc, field.name


def test_components_import_no_torch():
    """All in one process; a failure names the first module that imports torch or numpy."""
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert not {'torch', 'numpy'} & set(sys.modules), name\n"
    modules = sorted({entry.target.partition(":")[0] for entry in OURS})
    subprocess.run([sys.executable, "-c", code, *modules], check=True)


def test_slots_without_a_choice_are_the_defaults_of_the_recipe():
    config = DecoderConfig()
    chosen = (config.shape.attention, config.shape.mlp, config.shape.norm)
    assert chosen == (GQA(), SwiGLU(), RMSNormConfig())
    loaded = {(entry.group, entry.name): Registry().load_entry(entry) for entry in OURS}
    slots = {
        field.name: next(m for m in field.type.__metadata__ if isinstance(m, Slot))
        for field in fields_of(DecoderConfig)
        if field.name in ("attention", "mlp", "norm")
    }
    for name, part in zip(("attention", "mlp", "norm"), chosen, strict=True):
        assert loaded[slots[name].group, slots[name].default] is type(part)


def test_heads_follow_when_kv_heads_is_absent():
    assert DecoderConfig(dim=4096, heads=64).shape.kv_heads == 64
    assert DecoderConfig(dim=4096, heads=16).shape.kv_heads == 16
    assert DecoderConfig(dim=4096, heads=16, kv_heads=4).shape.kv_heads == 4


@pytest.mark.parametrize(("dim", "expected"), [(192, 512), (256, 704), (320, 896), (4096, 10944)])
def test_feed_forward_width_is_two_thirds_of_four_dim_rounded_up(dim, expected):
    # 8/3 * 192 = 512 exactly; 682.7, 853.3 and 10922.7 go up to the next multiple of 64.
    assert DecoderConfig(dim=dim, heads=2).shape.ffn_dim == expected
    assert DecoderConfig(dim=dim, heads=2, ffn_dim=100).shape.ffn_dim == 100


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 8, "kv_heads": 3}, "kv_heads 3 must divide heads 8"),
        ({"dim": 100, "heads": 8}, "dim 100 must be a multiple of heads 8"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
        ({"dim": 24, "heads": 8}, "dim 24 / heads 8 = head_dim 3 must be even"),
        ({"attention": GQA(window=4, global_layers=(1, 8))}, r"global_layers \[8\] do not exist; layers are numbered 0 to 7"),
        ({"rope": Rope(local_theta=10.0)}, "local_theta needs local layers"),
        ({"rope": Rope(partial=0.3)}, "19 of head_dim 64 dimensions rotate"),
        ({"attention": MLA(), "kv_heads": 4}, "mla does not use kv_heads; remove kv_heads 4"),
        ({"attention": MLA(), "rope": Rope(partial=0.5)}, "mla uses qk_rope_head_dim"),
    ],
)
def test_rules_between_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**fields)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GQA(window=4, global_every=2, global_layers=(1,)), "exclude each other"),
        (lambda: GQA(global_every=2), "need a window"),
        (lambda: GQA(nope_every=2, nope_layers=(1,)), "nope_every and nope_layers exclude each other"),
        (lambda: DecoderConfig(layers=2, attention=GQA(nope_layers=(1, 2))), r"nope_layers \[2\] do not exist"),
        (lambda: GQA(core="varlen", soft_cap=3.0), "does not support soft_cap"),
        (lambda: MLA(qk_rope_head_dim=5), "qk_rope_head_dim 5 must be even"),
    ],
)
def test_rules_of_attentions(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_which_layers_are_local():
    def windows(**fields):
        return [GQA(window=7, **fields).window_at(layer) for layer in range(6)]

    assert windows() == [7] * 6
    assert windows(global_every=2) == [7, None] * 3  # Gemma-2: every second
    assert windows(global_every=6) == [7] * 5 + [None]  # Gemma-3: every sixth
    assert windows(global_layers=(0, 1)) == [None, None, 7, 7, 7, 7]
    assert GQA().window_at(3) is None


def test_an_mlp_of_two_matrices_is_four_times_as_wide():
    for mlp in (GELU(), ReLU(), ReLU2()):
        assert DecoderConfig(dim=192, mlp=mlp).shape.ffn_dim == 768
    assert DecoderConfig(dim=192, mlp=GeGLU()).shape.ffn_dim == 512
