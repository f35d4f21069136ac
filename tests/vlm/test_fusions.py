"""What every fusion must hold: text is the text model, nothing sees the future, a sample does not depend on its neighbors."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from forge_models.blocks.block import Block
from forge_models.components.attentions import GQA
from forge_models.components.experts import MoEConfig
from forge_vlm.components.adapters import AttentionPoolConfig, MLPConfig, PerceiverConfig
from forge_vlm.components.fusions import CrossAttention, MixtureOfTransformers, MoMa
from vlm.tiny import CAUSAL, EXPERTS, IMAGE, JOINT, MODELS, TEXT, batch, build, image, row


class Moves(TorchDispatchMode):
    """Counts rows that are gathered by their numbers."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor):
            self.rows += len(found)
        return found


ALL = pytest.mark.parametrize("name", MODELS)


def longest(component: Any, *pieces: Any, length: int = 16) -> Any:
    """A row filled up with text."""
    ids, images = row(component, *pieces)
    return [*ids, *(2 + place % 30 for place in range(length - len(ids)))], images


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Bit for bit; with experts to rounding: how a product of many rows is summed depends on the rows of others."""
    return torch.allclose(one, two, rtol=0, atol=1e-12)


def copied(text: Any, model: Any) -> None:
    """Gives every copy in a fusion the weights of the text model."""
    given = dict(text.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = ".".join(part for part in name.split(".") if part not in ("text", "image"))
            if plain in given and given[plain].shape == parameter.shape:
                parameter.copy_(given[plain])


@pytest.mark.parametrize("name", ["joint", "joint-bidirectional", "joint-prefix", "cross", "mot"])
def test_text_alone_has_the_bits_of_the_text_model(name: str) -> None:
    """T2, in fp32; gates of the cross blocks are open."""
    text, model = build(TEXT).float(), build(MODELS[name]).float()
    copied(text, model)
    tokens = torch.tensor([longest(MODELS[name])[0], longest(MODELS[name], 5, 6)[0]])
    wanted = text(tokens)
    assert torch.equal(model(tokens), wanted)
    none = torch.full((2, 1), -1)
    assert torch.equal(model(tokens, images=torch.randn(1, 1, 8, 8), image_rows=none), wanted)
    model.train()
    assert torch.equal(model(tokens), wanted), "where what belongs to images runs on nothing, as on every rank"


@ALL
def test_an_image_changes_what_comes_behind_it_and_nothing_before(name: str) -> None:
    """T4: what stands before an image, and other rows."""
    component = MODELS[name]
    model = build(component)
    before = [3, 4, 5]
    rows = [longest(component, *before, seed, 6, 7, length=20) for seed in ("1", "2")]
    other = longest(component, 9, "7", 8, length=20)
    one, two = (model(**batch(first, other)) for first in rows)
    moved = (one - two).abs().amax(-1)
    if name != "joint-prefix":
        assert same(one[0, : len(before)], two[0, : len(before)])
    assert moved[0, len(before) + component.per_image] > 1e-6
    assert same(one[1], two[1])


@pytest.mark.parametrize("name", CAUSAL)
def test_a_token_does_not_reach_back(name: str) -> None:
    """T4: exactly nothing before the place that changes, also across images; experts in evaluation look at a token alone."""
    component = MODELS[name]
    model = build(component)
    ids, images = longest(component, 3, "1", 4, "2", 5, length=24)
    for place in (0, len(ids) - 3, len(ids) - 8):
        changed = [*ids]
        changed[place] = (ids[place] + 7) % 30 + 2
        if IMAGE in (ids[place], changed[place]):
            continue
        one, two = model(**batch((ids, images))), model(**batch((changed, images)))
        assert same(one[:, :place], two[:, :place])
        assert not same(one[:, place:], two[:, place:])


def test_a_token_of_an_image_sees_all_of_its_image_and_no_other() -> None:
    component = MODELS["joint-bidirectional"]
    model = build(component)
    layers = model.fusion
    tokens = torch.tensor([row(component, 3, "1", "2", 4)[0]])
    from forge_vlm.fusion.fusion import Inputs

    seen = layers.seen(None, Inputs(tokens, None, None, None), None, torch.zeros(1, 10, 16))[0, 0]
    wanted = torch.ones(10, 10).tril().bool()
    wanted[1:5, 1:5] = True
    wanted[5:9, 5:9] = True
    assert torch.equal(seen, wanted)
    prefix = build(MODELS["joint-prefix"]).fusion
    seen = prefix.seen(None, Inputs(tokens, None, None, None), None, torch.zeros(1, 10, 16))[0, 0]
    wanted = torch.ones(10, 10).tril().bool()
    wanted[:9, :9] = True
    assert torch.equal(seen, wanted)
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1]])
    seen = prefix.seen(None, Inputs(tokens, documents, None, None), None, torch.zeros(1, 10, 16))[0, 0]
    wanted = torch.ones(10, 10).tril().bool()
    wanted[:5, :5] = True
    wanted[5:9, 5:9] = True
    wanted[5:, :5] = False
    assert torch.equal(seen, wanted)


@ALL
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_a_sample_does_not_depend_on_its_batch_or_its_row(name: str, training: bool) -> None:
    """T5: alone, in a batch with another row, and packed behind another document in one row."""
    component = MODELS[name]
    model = build(component).train(training)
    sample, other = row(component, 3, "1", 4, 5, "2", 6), row(component, 7, "3", 8, 9, 10, "4")
    alone = model(**batch(sample))[0]
    assert torch.allclose(model(**batch(other, sample))[1], alone, rtol=0, atol=1e-10)
    packed = batch((other[0] + sample[0], other[1] + sample[1]))
    length, width = len(other[0]), packed["x"].shape[1]
    positions = torch.tensor([[*range(length), *range(width - length)]])
    documents = torch.tensor([[0] * length + [1] * (width - length)])
    together = model(**packed, positions=positions, documents=documents)[0]
    assert torch.allclose(together[length:], alone, rtol=0, atol=1e-10)


def test_copies_that_are_equal_are_one_model() -> None:
    """T6: MoT is the joint decoder, and so is MoMa with one expert of each modality whose score is 1."""
    joint = build(MODELS["joint"])
    inputs = batch(longest(JOINT, 3, "1", 4, "2", length=20), longest(JOINT, "3", 5, length=20))
    wanted = joint(**inputs)
    for kind in ("causal", "bidirectional_image"):
        mot = build(replace(JOINT, fusion=MixtureOfTransformers(image_attention=kind)), seed=1)
        copied(joint, mot)
        found = mot(**inputs)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-10) is (kind == "causal")
    one = MoEConfig(experts=1, top_k=1, ffn_dim=24, kernel="loop")
    moma = build(replace(JOINT, fusion=MoMa(), moe=one), seed=1)  # softmax over one expert is 1
    copied(joint, moma)
    given = dict(joint.named_parameters())
    with torch.no_grad():
        for name, parameter in moma.named_parameters():
            if ".experts." in name:
                block, _, part = name.partition(".mlp.")
                parameter.copy_(given[f"{block}.mlp.{part.rpartition('.')[2]}.weight"].unsqueeze(0))
    assert torch.allclose(moma(**inputs), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["mot", "moma-token"])
def test_the_order_of_modalities_means_nothing(name: str) -> None:
    """T7, with three."""
    one = replace(MODELS[name], modalities={"audio": (10, 14), "video": (20, 24)})
    two = replace(MODELS[name], modalities={"video": (20, 24), "audio": (10, 14)})
    first, second = build(one), build(two)
    assert {key: value.shape for key, value in first.state_dict().items()} == {
        key: value.shape for key, value in second.state_dict().items()
    }
    second.load_state_dict(first.state_dict())
    inputs = batch(longest(one, 3, "1", 11, 12, 21, length=16))
    assert torch.equal(first(**inputs), second(**inputs))


@ALL
def test_images_swap_with_their_placeholders(name: str) -> None:
    """T7: which number an image has in the batch means nothing."""
    component = MODELS[name]
    model = build(component)
    inputs = batch(longest(component, 3, "1", 4, length=16), longest(component, 5, "2", 6, length=16))
    swapped = {**inputs, "images": inputs["images"].flip(0), "image_rows": torch.tensor([[1], [0]])}
    assert torch.allclose(model(**inputs), model(**swapped), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["joint", "cross"])
def test_numbers_of_placeholders_and_images_that_differ_are_refused(name: str) -> None:
    """T11."""
    component = MODELS[name]
    model = build(component)
    inputs = batch(longest(component, 3, "1", 4, length=16), longest(component, 5, "2", 6, length=16))
    tokens = inputs["x"].clone()
    tokens[1, (tokens[1] == IMAGE).nonzero()[0]] = 2
    with pytest.raises(ValueError, match=r"row 1 has .* placeholders"):
        model(**{**inputs, "x": tokens})
    with pytest.raises(ValueError, match="row 0 has"):
        model(inputs["x"])
    with pytest.raises(ValueError, match="give both"):
        model(inputs["x"], images=inputs["images"])
    with pytest.raises(ValueError, match="does not take pixels"):
        model(inputs["x"], pixels=inputs["images"])
    with pytest.raises(ValueError, match="images have the shape"):
        model(**{**inputs, "images": torch.zeros(2, 3, 8, 8)})


def test_closed_gates_are_the_text_model_and_open_first() -> None:
    """T3: with gates of 0 images change nothing, and of the cross blocks only gates have a gradient."""
    component = MODELS["cross"]
    model = build(component)
    gates = [parameter for name, parameter in model.named_parameters() if name.endswith("_gate")]
    assert len(gates) == 2
    with torch.no_grad():
        for gate in gates:
            gate.zero_()
    text = build(TEXT)
    copied(text, model)
    inputs = batch(longest(component, 3, "1", 4, length=16))
    found = model.train()(**inputs)
    assert torch.equal(found, text(inputs["x"]))
    found.square().sum().backward()
    for name, parameter in model.named_parameters():
        if ".cross." in name or name.startswith(("encoder.", "adapter.")):
            assert (parameter.grad.abs().sum() > 0) == name.endswith("_gate"), name


@ALL
def test_every_parameter_has_a_gradient_with_images_and_with_text_alone(name: str) -> None:
    """T12 on one rank: none is left out of what ranks exchange, with images, without, and without text."""
    component = MODELS[name]
    model = build(component).train()
    for pieces in ((3, "1", 4), (), ("1", "2", "3", "4")):
        model.zero_grad()
        inputs = (
            batch(longest(component, *pieces, length=16)) if pieces != ("1", "2", "3", "4") else batch(row(component, *pieces))
        )
        given = inputs if pieces else {"x": inputs["x"]}  # text as a source of text gives it
        model(**given).square().sum().backward()
        for path, parameter in model.named_parameters():
            assert parameter.grad is not None, path
            of_images = path.startswith(("encoder.", "adapter.")) or ".cross." in path or ".image." in path
            assert pieces or not of_images or not parameter.grad.any(), path


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("moma-choice", "moma-threshold")])
def test_text_alone_costs_what_it_costs_the_text_model(name: str) -> None:
    """Products of a training step, and nothing that moves tokens; with experts those of the same experts, where as many tokens
    are with each."""
    component = MODELS[name]
    text, model = build(replace(TEXT, moe=component.moe)).train(), build(component).train()
    tokens = torch.randint(2, 30, (8, 48), generator=torch.Generator().manual_seed(3))
    found, moved = [], []
    for module in (text, model):
        with FlopCounterMode(display=False) as products, Moves() as moves:
            module(tokens).square().sum().backward()
        found.append(products.get_total_flops())
        moved.append(moves.rows)
    assert found[0] <= found[1] <= 1.02 * found[0]
    assert component.moe is not None or moved[1] == moved[0]


@ALL
def test_no_kernel_of_attention_is_given_an_empty_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a GPU refuse it."""
    real = torch.nn.functional.scaled_dot_product_attention

    def refusing(q: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        assert q.numel(), "an empty batch"
        return real(q, *given, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refusing)
    for adapter in (MLPConfig(), AttentionPoolConfig(heads=2), PerceiverConfig(latents=2, heads=2)):
        model = build(replace(MODELS[name], adapter=adapter)).train()
        model(torch.tensor([[3, 4, 5, 6]])).square().sum().backward()


def test_specs_are_of_every_tensor() -> None:
    for component in MODELS.values():
        model = component.build()
        specs = model.specs()
        tensors = {*dict(model.named_parameters()), *dict(model.named_buffers())}
        assert tensors == set(specs.tensors)
        modules = dict(model.named_modules())
        assert set(specs.modules) <= set(modules)
        assert {"encoder", "adapter"} <= set(specs.entry)


def test_bad_keys_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"fusion": CrossAttention(every=9)}, "adds no cross block"),
        ({"fusion": MoMa(routing="threshold"), "moe": replace(EXPERTS, capacity=1.0)}, "supports neither moe.capacity"),
        ({"modalities": {"image": (1, 2)}}, "reserved for the encoder"),
        ({"modalities": {"text": (1, 2)}}, "no other modality claims"),
        ({"modalities": {"a": (1, 5), "b": (4, 8)}}, "share ids"),
        ({"modalities": {"a": (0, 5)}}, "0 < first"),
        ({"image_token": 40}, "vocab_size"),
        ({"images": "tokens"}, "needs the ids of images"),
        ({"images": "tokens", "image_token": 3, "modalities": {"a": (5, 6)}}, "placeholder"),
        ({"images": "tokens", "modalities": {"image": (5, 9)}, "fusion": CrossAttention(every=2)}, "needs an image encoder"),
    ]
    for keys, message in wrong:
        with pytest.raises(ValueError, match=message):
            replace(JOINT, **keys)


def test_every_block_of_a_text_model_stays_what_it_was() -> None:
    assert all(type(block) is Block for block in build(TEXT).blocks.values())
    assert image(1).shape == (1, 8, 8)


@pytest.mark.parametrize("name", ["mot", "mot-experts", "moma-token", "cross"])
def test_inner_values_of_each_modality_have_a_name(name: str) -> None:
    """Nothing is passed twice under one name: a reader could not tell which is which."""
    from forge_models.inner_values import listening

    component = MODELS[name]
    model = build(component)
    heard: list[str] = []
    with listening(lambda path, _: heard.append(path)):
        model(**batch(longest(component, 3, "1", 4, length=16)))
    assert len(heard) == len(set(heard)), sorted({path for path in heard if heard.count(path) > 1})
    assert any((".cross." if name == "cross" else ".image.") in path for path in heard)


def test_moma_without_experts_has_the_default_ones() -> None:
    assert replace(JOINT, fusion=MoMa()).moe == MoEConfig()


@pytest.mark.parametrize("option", ["output_gate", "sinks"])
def test_options_of_attention_without_weights_for_each_modality_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=rf"set model\.attention\.{option} = false"):
        replace(MODELS["mot"], attention=GQA(**{option: True})).build()


def test_blocks_of_text_that_fusions_do_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"set model\.parallel_residual = false"):
        replace(MODELS["mot"], parallel_residual=True).build()
    with pytest.raises(ValueError, match=r"set model\.layer_scalar = false"):
        replace(MODELS["mot"], layer_scalar=True).build()
    with pytest.raises(ValueError, match="ReusingAttention cannot have weights for each modality"):
        replace(MODELS["mot"], attention=GQA(v_norm=True)).build()
    with pytest.raises(ValueError, match=r"set model\.moe\.branch_norms = false"):
        replace(MODELS["moma-token"], moe=replace(EXPERTS, shared=1, branch_norms=True)).build()
    with pytest.raises(ValueError, match=r"remove model\.moe\.latent_dim"):
        replace(MODELS["moma-token"], moe=replace(EXPERTS, latent_dim=8)).build()
    with pytest.raises(ValueError, match=r"set model\.moe\.shared_gate = false"):
        replace(MODELS["moma-token"], moe=replace(EXPERTS, shared=1, shared_gate=True)).build()
