"""A vision-language model that starts from a text model: text has the logits that it had, and what is new begins as drawn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.errors import ForgeError
from forge_core.protocols.weights import StoredTensor, WeightsInfo
from forge_core.registry import Registry
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_testing.modules import InMemory
from forge_train.inference.stored import open_weights
from forge_train.run.loop import fit
from forge_vlm.components.adapters import MLPConfig
from forge_vlm.components.encoders import ViT
from forge_vlm.components.fusions import CrossAttention, JointDecoder, MixtureOfTransformers, MoMa
from forge_vlm.components.model import VLM
from forge_vlm.from_text import counterparts, from_text
from train.runs import TINY, prepared
from vlm.encoders.test_published import siglip, stored

KEYS: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "max_length": 64}
VISION: dict[str, Any] = {"encoder": ViT(size=8, patch=4, dim=8, layers=1, heads=2), "adapter": MLPConfig()}
MODELS = {
    "joint": VLM(**KEYS, **VISION, vocab_size=40, fusion=JointDecoder()),
    "cross": VLM(**KEYS, **VISION, vocab_size=40, fusion=CrossAttention(every=2)),
    "mot": VLM(**KEYS, **VISION, vocab_size=40, fusion=MixtureOfTransformers()),
    "moma": VLM(**KEYS, **VISION, vocab_size=40, fusion=MoMa(), moe=MoEConfig(experts=4, kernel="loop")),
    "moma scaled": VLM(
        **KEYS,
        **VISION,
        vocab_size=40,
        fusion=MoMa(),
        moe=MoEConfig(experts=4, kernel="loop", router=SigmoidTopKConfig(scaling=2.5)),
    ),
}


class Text:
    """Weights of a text model in memory."""

    def __init__(self, vocab_size: int) -> None:
        self.model = DecoderConfig(**KEYS, vocab_size=vocab_size)
        self.module = self.model.build().double()
        draw = torch.Generator().manual_seed(0)
        for tensor in self.module.parameters():
            tensor.data.copy_(torch.randn(tensor.shape, generator=draw, dtype=torch.float64) * 0.1)
        self.held = dict(self.module.named_parameters())
        self.tensors = {name: StoredTensor(tuple(tensor.shape), "float64") for name, tensor in self.held.items()}
        self.facts = WeightsInfo(origin="text")

    def read(self, names: Any) -> dict[str, torch.Tensor]:
        return {name: self.held[name].detach() for name in names}

    def box(self, name: str, offset: Any, extent: Any) -> torch.Tensor:
        return self.held[name].detach()[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]


def started(model: VLM, text: Text) -> tuple[Any, set[str]]:
    """The module, and names of what was drawn."""
    weights = from_text(text, model, model.modality_ids.names)
    module: Any = model.build().double()
    for name, tensor in module.named_parameters():
        tensor.data.copy_(torch.zeros(()) if name.endswith("gate") else torch.randn(tensor.shape) * 0.1)
    for tensor in module.buffers():
        tensor.zero_()
    names = dict(module.named_parameters())
    for name, value in weights.read(list(weights.tensors)).items():
        assert value.shape == names[name].shape, name
        names[name].data.copy_(value)
    return module.eval(), set(names) - set(weights.tensors)


@pytest.mark.parametrize("name", MODELS)
def test_text_has_the_logits_of_the_text_model(name: str) -> None:
    text = Text(40)
    module, drawn = started(MODELS[name], text)
    tokens = torch.arange(30).reshape(2, 15) % 39
    with torch.no_grad():
        assert (module(tokens) - text.module.eval()(tokens)).abs().max() < 1e-12
    assert all(part.startswith(("encoder.", "adapter.")) or ".cross." in part or ".router." in part for part in drawn)


def test_trials_h_shared_experts_have_no_counterpart_and_change_the_logits() -> None:
    """As the page on images says; every other tensor of the blocks is as it would be without them."""
    moe = MoEConfig(experts=4, kernel="loop", shared=1)
    text = Text(40)
    module, drawn = started(replace(MODELS["moma"], moe=moe), text)
    shared = {name for name, _ in module.named_parameters() if ".shared." in name}
    assert shared and shared <= drawn
    tokens = torch.arange(30).reshape(2, 15) % 39
    with torch.no_grad():
        assert (module(tokens) - text.module.eval()(tokens)).abs().max() > 1e-6
        for name, tensor in module.named_parameters():
            if name.endswith("shared.down_proj.weight"):
                tensor.zero_()
        assert (module(tokens) - text.module.eval()(tokens)).abs().max() < 1e-12


def test_images_are_read_by_a_copy_of_the_text_model() -> None:
    """Of a mixture of transformers: as by a joint decoder, whose weights are those of all modalities."""
    text = Text(40)
    (joint, _), (mot, _) = (started(MODELS[name], text) for name in ("joint", "mot"))
    mot.encoder.load_state_dict(joint.encoder.state_dict())
    mot.adapter.load_state_dict(joint.adapter.state_dict())
    tokens = torch.tensor([[1, 39, 39, 39, 39, 2, 3]])
    inputs = {"images": torch.randn(1, 3, 8, 8, dtype=torch.float64), "image_rows": torch.tensor([[0]])}
    with torch.no_grad():
        assert (mot(tokens, **inputs) - joint(tokens, **inputs)).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["mot", "moma"])
def test_trials_c6_what_starts_from_a_joint_decoder_reads_images_as_that_does(name: str) -> None:
    """Every modality begins as a copy, the encoder is the same, and nothing but routers is drawn: experts alike add up to one."""
    joint = InMemory(MODELS["joint"])
    module: Any = MODELS["joint"].build().double()
    module.load_state_dict({key: value.double() for key, value in joint.read(list(joint.tensors)).items()}, strict=False)
    found, drawn = started(MODELS[name], joint)
    assert all(".router." in part for part in drawn)
    tokens = torch.tensor([[1, 39, 39, 39, 39, 2, 3]])
    inputs = {"images": torch.randn(1, 3, 8, 8, dtype=torch.float64), "image_rows": torch.tensor([[0]])}
    with torch.no_grad():
        assert (found(tokens, **inputs) - module.eval()(tokens, **inputs)).abs().max() < 1e-12


def test_experts_of_a_modality_begin_as_those_of_the_text_model() -> None:
    moe = MoEConfig(experts=4, kernel="loop")
    text = InMemory(DecoderConfig(**KEYS, vocab_size=40, moe=moe))
    weights = from_text(text, MODELS["moma"], MODELS["moma"].modality_ids.names)
    for part in ("experts.up_proj", "router.weight"):
        name = f"blocks.1.mlp.layers.image.{part}"
        assert torch.equal(weights.read([name])[name], text.read([f"blocks.1.mlp.{part}"])[f"blocks.1.mlp.{part}"])


def test_more_ids_begin_as_the_mean_of_the_known() -> None:
    text, model = Text(30), MODELS["joint"]
    weights = from_text(text, model, model.modality_ids.names)
    for name in ("embed.weight", "head.weight"):
        known = text.held[name].detach()
        whole = weights.read([name])[name]
        assert torch.equal(whole[:30], known) and (whole[30:] - known.mean(0)).abs().max() < 1e-15 and len(whole) == 40
        for start, rows, column, columns in ((0, 10, 0, 16), (25, 10, 4, 8), (32, 8, 0, 3)):
            box = weights.box(name, (start, column), (rows, columns))
            assert torch.equal(box, whole[start : start + rows, column : column + columns])
    assert any("2 tables have more ids than the text model" in note for note in weights.facts.notes)


def test_boxes_of_experts_are_those_of_the_whole() -> None:
    model = MODELS["moma"]
    weights = from_text(Text(40), model, model.modality_ids.names)
    name = "blocks.1.mlp.layers.image.experts.up_proj"
    whole = weights.read([name])[name]
    assert torch.equal(weights.box(name, (1, 3, 2), (2, 5, 7)), whole[1:3, 3:8, 2:9])


def test_names_of_counterparts() -> None:
    names = ("text", "image", "sound")
    assert counterparts("blocks.3.attention.q_proj.image.weight", names) == ("blocks.3.attention.q_proj.weight",)
    assert counterparts("blocks.3.mlp.sound.up_proj.weight", names) == ("blocks.3.mlp.up_proj.weight",)
    experts = ("blocks.3.mlp.experts.down_proj", "blocks.3.mlp.down_proj.weight")
    assert counterparts("blocks.3.mlp.layers.text.experts.down_proj", names) == experts
    for same in ("encoder.layers.0.mlp.up_proj.weight", "blocks.3.mlp.up_proj.weight", "norm.weight"):
        assert counterparts(same, names) == ()


def test_weights_of_the_same_kind_are_taken_as_they_are() -> None:
    text: Any = Text(40)
    text.model = MODELS["mot"]
    assert from_text(text, replace(MODELS["mot"]), ("text", "image")) is text


@pytest.fixture(scope="module")
def run_of_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "tiny.toml").write_text(TINY)
    (folder / "seeing.toml").write_text(TINY.replace('name = "decoder"', 'name = "vlm"'))
    run, _ = prepared(folder / "tiny.toml", [f"--job.dir={folder / 'run'}", "--schedule.name=constant", "--train.max_steps=2"])
    fit(run)
    return folder


def test_a_run_starts_from_a_text_run_and_a_published_tower(
    run_of_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The decoder is that of the run, the encoder that of the folder, and what is new is named."""
    caplog.set_level("INFO")
    stored(tmp_path / "tower", siglip())
    more = [f"--start.weights={run_of_text / 'run'}", "--model.fusion={name='mot'}"]
    tower = f"--model.encoder={{name='siglip', path='{tmp_path / 'tower'}'}}"
    short = ["--schedule.name=constant", "--train.max_steps=2"]
    run, _ = prepared(run_of_text / "seeing.toml", [f"--job.dir={tmp_path / 'new'}", *short, *more, tower])
    source = open_weights(run_of_text / "run", Registry())
    found = dict(run.model.tensors())
    for name in ("blocks.0.attention.q_proj.text.weight", "blocks.0.attention.q_proj.image.weight"):
        wanted = source.read(["blocks.0.attention.q_proj.weight"])["blocks.0.attention.q_proj.weight"]
        assert torch.equal(found[name].detach(), wanted)
    weights = run.job.model.encoder.weights()
    read = weights.read(list(weights.tensors))
    assert all(torch.equal(found[f"encoder.{name}"].detach(), value) for name, value in read.items())
    drawn = next(record.message for record in caplog.records if "drawn from job.seed" in record.message)
    assert "adapter." in drawn and "encoder." not in drawn and "blocks." not in drawn


def test_trials_c6_weights_of_another_fusion_are_never_drawn_silently(
    run_of_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each modality has its own weights in the source and none in the model: refused with the numbers, unless it is allowed."""
    caplog.set_level("INFO")
    short = ["--schedule.name=constant", "--train.max_steps=1", "--model.vocab_size=62"]
    vision = "--model.encoder={name='vit', size=8, patch=4, dim=8, layers=1, heads=2}"
    seeing, given = run_of_text / "seeing.toml", [*short, vision]
    run, _ = prepared(seeing, [f"--job.dir={tmp_path / 'mot'}", *given, "--model.fusion={name='mot'}"])
    fit(run)
    start = [f"--start.weights={tmp_path / 'mot'}", f"--job.dir={tmp_path / 'joint'}"]
    with pytest.raises(ForgeError) as refusal:
        prepared(seeing, [*given, *start])
    said = str(refusal.value)
    names = {name for name in dict(run.model.tensors()) if ".text." in name}
    assert f"{len(names)} of them under other names" in said and "would be drawn from job.seed" in said
    assert "blocks.0.attention_norm.weight is blocks.0.attention_norm." in said and "start.draw" in said
    assert not (tmp_path / "joint").exists(), "a start that is refused leaves nothing"
    with pytest.raises(ForgeError, match=r"start\.draw: 'blocks\.7\.\*' fits no tensor that is drawn"):
        prepared(seeing, [*given, *start, "--start.draw=['blocks.*', 'blocks.7.*']"])
    run, _ = prepared(seeing, [*given, *start, "--start.draw=['blocks.*']"])
    assert run.state.step == 0
    # The other way every modality has a copy, and nothing is drawn.
    fit(run)
    caplog.clear()
    back = [f"--start.weights={tmp_path / 'joint'}", f"--job.dir={tmp_path / 'back'}", "--model.fusion={name='mot'}"]
    prepared(seeing, [*given, *back])
    assert "drawn from" not in caplog.text


def test_a_tower_that_both_have_is_refused(run_of_text: Path, tmp_path: Path) -> None:
    stored(tmp_path / "tower", siglip())
    tower = f"--model.encoder={{name='siglip', path='{tmp_path / 'tower'}'}}"
    tiny, short = run_of_text / "seeing.toml", ["--schedule.name=constant", "--train.max_steps=2", "--model.vocab_size=62", tower]
    run, _ = prepared(tiny, [f"--job.dir={tmp_path / 'one'}", *short])
    fit(run)
    again = [f"--job.dir={tmp_path / 'two'}", *short, f"--start.weights={tmp_path / 'one'}"]
    with pytest.raises(ForgeError, match=r"both have its tensors; leave them out with start\.exclude = \['encoder\.\*'\]"):
        prepared(tiny, again)
    run, _ = prepared(tiny, [*again, "--start.exclude=['encoder.*']"])
    assert run.state.step == 0
