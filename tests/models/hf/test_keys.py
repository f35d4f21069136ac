"""Keys of `config.json`: which are ignored under which value, what `--ignore` may leave out, and how strictly values are read."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from forge_core.errors import ConfigError, ForgeError
from forge_models.hf.config import IGNORED_BY_ALL, Anything, Keys, Same
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import Family, decoder_of, meaning_of
from models.hf.zoo import CASES, SIZES, sizes_of

SMALL = {
    "deepseek_v3": {"num_key_value_heads": 4},
    "deepseek_v32": {"num_key_value_heads": 4, "index_topk": 5},
    "deepseek_v4": {"num_key_value_heads": 1, "head_dim": 12, "partial_rotary_factor": 0.5, "index_topk": 5, "o_groups": 2}
    | {"intermediate_size": 20, "moe_intermediate_size": 20, "index_head_dim": 8},
    "kimi_linear": {"num_key_value_heads": 4, "model_max_length": 64, "moe_renormalize": False},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"], "sliding_window": None},
    "gemma4_text": {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 97, "num_key_value_heads": 2, "head_dim": 16}
    | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 16},
    "gpt_neox": {"hidden_size": 64, "num_key_value_heads": 4},
    "stablelm": {"hidden_size": 64},
}


def small(family: Family) -> dict[str, Any]:
    """A configuration with every key that the family has a default for."""
    sizes = sizes_of(family.model_type)
    defaults = {key: value for key, value in family.defaults.items() if key not in sizes}
    window = {"sliding_window": 6} if "sliding_window" in defaults else {}
    return sizes | defaults | window | SMALL.get(family.model_type, {})


def read_by(family: Family, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys that decide what the model computes."""
    found: list[Keys] = []
    finish = Keys.finish
    with monkeypatch.context() as patch:
        patch.setattr(Keys, "finish", lambda self: (found.append(self), finish(self))[1])
        decoder_of(family, values, "here")
    return found[0]._asked


def refused(family: Family, values: dict[str, Any], key: str) -> None:
    with pytest.raises(ForgeError) as caught:
        decoder_of(family, values, "here")
    assert key.split(".")[0] in str(caught.value), (key, values.get(key))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_p1_a_key_is_ignored_under_its_declared_values_only(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    values = small(family)
    meaning, read = meaning_of(decoder_of(family, values, "here")), read_by(family, values, monkeypatch)
    ignorable = {key: allowed for key, allowed in {**IGNORED_BY_ALL, **family.ignores}.items() if key not in read}
    assert len(ignorable) > 50
    for key, allowed in ignorable.items():
        for entry in allowed:
            if isinstance(entry, Same) and entry.key not in values:
                values |= {entry.key: 0.25}
                meaning = meaning_of(decoder_of(family, values, "here"))
            value = "anything" if isinstance(entry, Anything) else values[entry.key] if isinstance(entry, Same) else entry
            assert meaning_of(decoder_of(family, values | {key: value}, "here")) == meaning, key
        if not isinstance(allowed[0], Anything):
            refused(family, values | {key: 0.123}, key)
            assert meaning_of(decoder_of(family, values | {key: 0.123}, "here", [key])) == meaning


def test_p1_unknown_keys_are_left_out_by_name_only() -> None:
    family = FAMILIES["llama"]
    values = SIZES | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "extra": 3}, "one": 1, "attention_dropout": 0.1}
    names = ["one", "attention_dropout", "rope_scaling.extra"]
    assert decoder_of(family, values, "here", names).rope.factor == 2.0
    for left in names:
        with pytest.raises(ConfigError) as caught:
            decoder_of(family, values, "here", [name for name in names if name != left])
        assert [fault.key for fault in caught.value.faults] == [left]
    with pytest.raises(ConfigError, match=r"convert --ignore one or model\.from_hf_ignore"):
        decoder_of(family, values, "here")


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "hidden_act",
        "rope_scaling",
        "rope_scaling.factor",
        "rope_scaling.beta_fast",
        "head_dim",
        "absent",
        "mlp_bias",
    ],
)
def test_p1_what_decides_a_logit_cannot_be_left_out(key: str) -> None:
    values = SIZES | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0}}
    with pytest.raises(ConfigError) as caught:
        decoder_of(FAMILIES["llama"], values, "here", [key])
    assert [fault.key for fault in caught.value.faults] == [key]


def wrong(value: Any) -> Iterator[Any]:
    """What is not right in the place of `value`: other types, true for numbers and numbers for true, what is not positive."""
    yield from ("5", -1, float("nan"), float("inf"), 10**400) if not isinstance(value, str) else (5, True)
    yield from (value for value in ([[1]], {"a": [1]}) if not isinstance(value, dict))
    yield from (0, 1) if isinstance(value, bool) else (True,)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_w12_values_of_every_key_are_read_strictly(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    values = small(family)
    read = read_by(family, values, monkeypatch)
    assert len(read) > 10
    for key in sorted(read):
        for value in wrong(values.get(key)):
            refused(family, values | {key: value}, key)


@pytest.mark.parametrize("case", [name for name, (_, keys) in CASES.items() if "rope_scaling" in keys])
def test_w12_values_of_tables_of_rope_are_read_strictly(case: str) -> None:
    kind, keys = CASES[case]
    values = SIZES | keys | SMALL.get(kind, {})
    for spelling in ("rope_scaling", "rope_parameters"):
        table = keys["rope_scaling"] | {"rope_theta": 10000.0}
        plain = {key: value for key, value in values.items() if key != "rope_scaling"}
        nested = spelling == "rope_parameters" and kind in ("gemma3_text", "olmo3")
        decoder_of(FAMILIES[kind], plain | {spelling: {"full_attention": table} if nested else table}, "here")
        for name, value in table.items():
            for other in wrong(value):
                changed = table | {name: other}
                refused(FAMILIES[kind], plain | {spelling: {"full_attention": changed} if nested else changed}, spelling)


@pytest.mark.parametrize("value", [0, -1, -10000.0, "10000", True, [1]])
def test_w12_a_base_that_is_not_a_positive_number_is_refused(value: Any) -> None:
    for kind, keys in (
        ("llama", {"rope_theta": value}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": value}}),
        ("gemma3_text", {"rope_local_base_freq": value}),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": value}}},
        ),
    ):
        with pytest.raises(ConfigError, match="expected a positive number"):
            decoder_of(FAMILIES[kind], SIZES | keys, "here")


@pytest.mark.parametrize("kind", ["gemma3_text", "olmo3"])
def test_w12_tables_that_transformers_would_not_look_at_are_refused(kind: str) -> None:
    table = {"rope_type": "linear", "factor": 2.0}
    for keys in ({"rope_parameters": table}, {"rope_scaling": {"full_attention": table}}):
        with pytest.raises(ConfigError, match=next(iter(keys))):
            decoder_of(FAMILIES[kind], SIZES | keys, "here")
    with pytest.raises(ConfigError, match="'yarn' is not implemented for this family"):
        decoder_of(FAMILIES["phi3"], SIZES | {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "here")
    with pytest.raises(ConfigError, match="rope_local_base_freq"):
        decoder_of(FAMILIES["olmo3"], SIZES | {"rope_local_base_freq": 10.0}, "here")


def test_p1_two_spellings_that_differ_are_refused() -> None:
    table = {"rope_type": "yarn", "type": "linear", "factor": 2.0}
    with pytest.raises(ConfigError, match="'linear', but rope_type is 'yarn'"):
        decoder_of(FAMILIES["llama"], SIZES | {"rope_scaling": table}, "here")
    with pytest.raises(ConfigError, match="norm_eps"):
        decoder_of(FAMILIES["llama"], SIZES | {"rms_norm_eps": 1e-5, "norm_eps": 1e-6}, "here")
    assert json.dumps(meaning_of(decoder_of(FAMILIES["llama"], SIZES | {"norm_eps": 1e-6}, "here")), default=str)


@pytest.mark.parametrize("place", ["beside", "inside", "null", "absent"])
def test_p1_a_repetition_is_compared_with_what_holds_wherever_that_is_said(place: str) -> None:
    """`rope_pct` of StableLM repeats `partial_rotary_factor`, which newer versions keep in the table of rotary positions."""
    inside = {"rope_parameters": {"partial_rotary_factor": 0.5}}
    beside = {"partial_rotary_factor": 0.5}
    keys = {"beside": beside, "inside": inside, "null": inside | {"partial_rotary_factor": None}, "absent": {}}
    share = 0.25 if place == "absent" else 0.5
    assert decoder_of(FAMILIES["stablelm"], SIZES | keys[place] | {"rope_pct": share}, "here").rope.partial == share
    with pytest.raises(ConfigError, match=r"rope_pct: 0\.75"):
        decoder_of(FAMILIES["stablelm"], SIZES | keys[place] | {"rope_pct": 0.75}, "here")
