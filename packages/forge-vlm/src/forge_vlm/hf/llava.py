"""Joint decoders as `LlavaForConditionalGeneration` (Liu et al., 2023): a tower of transformers, a projector, any text family.

model                                    folder
encoder.*                                vision_tower.*, without blocks behind the last feature
adapter.layers.0, .1                     multi_modal_projector.linear_1, linear_2
embed, blocks, norm, head                language_model.*, as the text family calls them
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.component import Component, class_name
from forge_core.protocols.weights import NO_EXTRAS, Weights
from forge_models.hf.card import usage_of
from forge_models.hf.config import ANY_VALUE, CONFIG, Allowed, Keys, Unsupported, read_config
from forge_models.hf.converter import opened
from forge_models.hf.family import Family, config_of, decoder_of
from forge_models.hf.names import DERIVED, TensorPlace
from forge_models.hf.reader import CheckpointTensors, facts_in, family_of
from forge_models.hf.writer import special_tokens, write_folder, write_json
from forge_vlm.components.adapters import LinearConfig, MLPConfig
from forge_vlm.components.encoders import CLIP, SigLIP
from forge_vlm.components.fusions import JointDecoder, MoMa
from forge_vlm.components.model import VLM
from forge_vlm.hf import processors
from forge_vlm.hf.text_and_vision import (
    TOWER_READERS,
    nested,
    preprocessor_config,
    text_decoder,
    text_family,
    text_misfits,
    text_places,
    tilers_of_run,
    tower_config,
    tower_constants,
    tower_misfits,
    tower_places,
    unused_tensors,
)
from forge_vlm.images.processing import FILE

if TYPE_CHECKING:
    from torch import Tensor

MODEL_TYPE, ARCHITECTURE = "llava", "LlavaForConditionalGeneration"
TEXT, TOWER, PROJECTOR = "language_model.", "vision_tower.", "multi_modal_projector."
HEAD, TABLE = f"{TEXT}lm_head.weight", f"{TEXT}model.embed_tokens.weight"
INNER = "vision_model."
"""Behind it in the names of a tower that is not DINOv2; newer versions of transformers write it no more and read both."""
ERNIE = "; in transformers only ernie4_5_vl_moe has experts by modality, with another tower and positions on three axes"
DEFAULTS: Mapping[str, Any] = {
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -2,
    "multimodal_projector_bias": True,
    "tie_word_embeddings": False,
}
"""Of keys that are absent, as in transformers."""
IGNORES: Mapping[str, Allowed] = {
    **dict.fromkeys(("image_seq_length", "ignore_index", "vocab_size", "hidden_size", "initializer_range"), ANY_VALUE),
}
LLAMA: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
"""Sizes of Llama that older folders leave out."""
LOGIT_KEYS = ("logits_scaling", "logit_scale")
"""Keys of text models with a factor on their logits."""


class Llava:
    """See `forge_core.protocols.weights.HfModel`."""

    def misfits(self, weights: Weights) -> list[str]:
        """See `HfModel`."""
        model = weights.model
        if type(model) is not VLM:
            return [f"a {type(model).__name__} is not a model 'vlm'"]
        tilers = (f"data.sources.tiling = {name!r}: the processor of LLaVA has no tiles" for name in tilers_of_run(weights))
        return [*_misfits(model), *tilers]

    def read(self, path: Path, ignore: Sequence[str] = ()) -> Any:
        """See `HfModel`."""
        return LlavaFolder(path, ignore)

    def write(self, path: Path, weights: Weights, *, tokenizer: Path | None, max_shard_bytes: int) -> None:
        """See `HfModel`."""
        import torch

        model = weights.model
        assert isinstance(model, VLM)
        config = _config(model)
        config["text_config"] |= special_tokens(weights, MODEL_TYPE, tokenizer or weights.facts.tokenizer)
        prefix = TOWER if config["vision_config"]["model_type"] == "dinov2" else TOWER + INNER
        constants, dtype = tower_constants(model.vision, prefix), weights.tensors["embed.weight"].dtype
        if isinstance(model.chosen_adapter, LinearConfig):
            constants |= _identity(model)

        def texts_of(folder: Path) -> None:
            write_json(folder / FILE, preprocessor_config(model.vision.processing))
            assert model.placeholder is not None, "LLaVA has an encoder"
            processors.write(folder, model.placeholder, lambda token: _processor(model, config, token))

        write_folder(
            path,
            weights,
            _places(text_family(model), model, prefix),
            config,
            tokenizer=tokenizer,
            max_shard_bytes=max_shard_bytes,
            usage=usage_of(ARCHITECTURE),
            constants={name: tensor.to(getattr(torch, dtype)) for name, tensor in constants.items()},
            texts=texts_of,
        )

    def reference(self, path: Path, tokens: "Tensor", extras: "Mapping[str, Tensor]" = NO_EXTRAS) -> "Tensor | str":
        """See `HfModel`."""
        import torch

        model = opened(path, ARCHITECTURE)
        if isinstance(model, str):
            return model
        given = {}
        if "image_rows" in extras and (rows := extras["image_rows"][extras["image_rows"] >= 0]).numel():
            given["pixel_values"] = extras["images"][rows]  # transformers takes them in the order of their placeholders
        with torch.no_grad():
            return model(tokens, **given).logits

    def examples(self, folder: Path) -> Iterable[Component]:
        """See `HfModel`."""
        from forge_vlm.encoders.tower_weights import write_tower

        sizes: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "vocab_size": 40}
        for name, encoder in (("clip", CLIP), ("siglip", SigLIP)):
            write_tower(folder / name, name)
            tower = encoder(path=str(folder / name), feature_layers=(-1,))
            yield VLM(**sizes, max_length=64, encoder=tower, fusion=JointDecoder())


class LlavaFolder(CheckpointTensors):
    """`Weights` of a LLaVA folder, of Forge or of others."""

    def __init__(self, folder: Path, ignore: Sequence[str] = ()) -> None:
        """Opens and checks everything but the values; see `forge_models.hf.reader.Folder`.

        Raises:
            ConfigError, Unsupported, ForgeError: a key, a tensor or a file that is not understood, missing, or left over.
        """
        values, where = read_config(folder), str(folder / CONFIG)
        family, self.model = model_of(values, folder, where, ignore)
        super().__init__(folder, _renamed)
        encoder = self.model.vision
        places = _places(family, self.model, TOWER)
        layers = int(values["vision_config"].get("num_hidden_layers", encoder.tower.family.defaults["num_hidden_layers"]))
        unused = unused_tensors(encoder, TOWER, layers)
        left = {name for name in self.names if not name.startswith(unused) and not name.endswith(DERIVED)}
        left -= {theirs for place in places.values() for theirs in place.names}
        if self.model.tied_embeddings and HEAD in left:
            left.remove(HEAD)
            self.check_tie(HEAD, TABLE)
        if isinstance(self.model.chosen_adapter, LinearConfig):
            left -= self._checked(_identity(self.model))
        self.match(places, left)
        skipped = sum(name.startswith(unused) for name in self.names)
        notes = [f"{skipped} tensors of the vision tower were left out; no feature needs them"] if skipped else []
        self.facts = facts_in(folder, {**values["text_config"], **values}, MODEL_TYPE, ignore, notes)

    def _checked(self, constants: "Mapping[str, Tensor]") -> set[str]:
        """Names of tensors that have to be what they are; one that is missing or otherwise is refused."""
        for name, wanted in constants.items():
            if name not in self.names or not bool((self.whole(name) == wanted).all()):
                raise Unsupported(f"{self.folder}: projector_hidden_act 'linear' needs {name} as it changes nothing")
        return set(constants)


def _misfits(model: VLM) -> Iterator[str]:
    """One sentence for each option of the recipe that LLaVA cannot hold."""
    fusion, adapter, encoder = model.chosen_fusion, model.chosen_adapter, model.vision
    if type(fusion) is not JointDecoder:
        yield f"fusion = {type(fusion).__name__}: LLaVA is a JointDecoder{ERNIE if type(fusion) is MoMa else ''}"
    elif fusion.image_attention != "causal":
        yield f"fusion.image_attention = {fusion.image_attention!r}: LLaVA is causal"
    if model.images != "encoder":
        yield f"images = {model.images!r}: LLaVA has an encoder"
        return
    if model.frame_time is not None:
        yield "frame_time: LLaVA has no times of frames; train without it, and let sources write timestamps"
    if model.modalities:
        yield f"modalities = {', '.join(model.modalities)}: LLaVA has text and images"
    yield from tower_misfits(encoder)
    if getattr(encoder, "feature_layers", None) == () and encoder.shape.last_norm:
        yield "encoder.feature_layers is empty, so features are normed, and LLaVA takes hidden states; train with [-1]"
    if type(adapter) not in (MLPConfig, LinearConfig):
        yield f"adapter = {class_name(adapter)}: LLaVA has an MLP of two matrices, or Linear"
    elif isinstance(adapter, MLPConfig) and adapter.hidden != 1:
        yield f"adapter.hidden = {adapter.hidden}: LLaVA's projector has one hidden layer"
    elif isinstance(adapter, MLPConfig) and adapter.hidden_dim not in (None, model.dim):
        yield f"adapter.hidden_dim = {adapter.hidden_dim}: LLaVA's projector is as wide as the decoder, {model.dim}"
    if model.soft_cap is not None:
        yield f"soft_cap = {model.soft_cap}: the head of LLaVA has none"
    if model.logit_multiplier != 1:
        yield f"logit_multiplier = {model.logit_multiplier}: the head of LLaVA has none"
    if misfits := text_misfits(model):
        yield from misfits
    elif text_family(model).scales_inputs and model.embed_multiplier != 1:
        yield f"embed_multiplier = {model.embed_multiplier}: in this format it would also multiply the features of images"


def _config(model: VLM) -> dict[str, Any]:
    """The keys of `config.json` for a model without misfits."""
    encoder, adapter, family = model.vision, model.chosen_adapter, text_family(model)
    outputs = encoder.shape.outputs or (-1,)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "text_config": config_of(family, text_decoder(model)),
        "vision_config": tower_config(encoder),
        "image_token_index": model.placeholder,
        "image_seq_length": model.per_image,
        "projector_hidden_act": "gelu" if isinstance(adapter, MLPConfig) else "linear",
        "multimodal_projector_bias": adapter.bias,
        "vision_feature_layer": outputs[0] if len(outputs) == 1 else list(outputs),
        "vision_feature_select_strategy": "default" if encoder.shape.class_token and not encoder.class_feature else "full",
        "tie_word_embeddings": model.tied_embeddings,
    }


def _processor(model: VLM, config: Mapping[str, Any], token: str) -> dict[str, Any]:
    """The keys of `processor_config.json`: how many placeholders, in words `token`, an image becomes."""
    shape = model.vision.shape
    return {
        "processor_class": "LlavaProcessor",
        "image_token": token,
        "patch_size": shape.patch_size,
        "num_additional_image_tokens": int(shape.class_token),  # "default" takes it off again
        "vision_feature_select_strategy": config["vision_feature_select_strategy"],
    }


def model_of(values: Mapping[str, Any], folder: Path, where: str, ignore: Sequence[str] = ()) -> tuple[Family, VLM]:
    """The text family and the model that a configuration describes.

    Raises:
        ConfigError, Unsupported: every key that is missing, wrong, or not implemented.
    """
    keys = Keys(values, DEFAULTS, where, IGNORES, ignore)
    tables = {}
    for name in ("text_config", "vision_config"):
        table = keys.get(name)
        if not isinstance(table, dict) or not isinstance(table.get("model_type"), str):
            raise Unsupported(f"{where}: {name} is not a table with a model_type")
        tables[name] = table
    text, kind = tables["text_config"], tables["vision_config"]["model_type"]
    if kind not in TOWER_READERS:
        raise Unsupported(f"{where}: vision_config.model_type {kind!r} is not implemented; only {', '.join(TOWER_READERS)} are")
    family = nested(family_of(text, f"{where} text_config"), where)
    decoder = decoder_of(family, {**(LLAMA if text["model_type"] == "llama" else {}), **text}, f"{where} text_config")
    if decoder.soft_cap is not None:
        keys.fault(
            "text_config.final_logit_softcapping",
            f"{decoder.soft_cap}: the text model caps its logits and {ARCHITECTURE} does not; which one the weights were trained "
            "for is not clear. Write null there for what transformers computes of this folder",
        )
    if decoder.logit_multiplier != 1:
        key = next(name for name in LOGIT_KEYS if name in family.defaults)
        keys.fault(f"text_config.{key}", f"the text model scales its logits, and {ARCHITECTURE} does not; write 1 there")
    if family.scales_inputs and decoder.embed_multiplier != 1:
        keys.fault(
            "text_config.embedding_multiplier",
            f"{decoder.embed_multiplier}: features of images are multiplied too; not implemented",
        )
    tied = keys.boolean("tie_word_embeddings")
    if "tie_word_embeddings" in values and tied and not decoder.tied_embeddings:
        keys.fault("tie_word_embeddings", "true, but text_config says otherwise; which holds is not clear")
    layers = keys.get("vision_feature_layer")
    layers = layers if isinstance(layers, list) else [layers]
    if not layers or any(type(each) is not int for each in layers):
        keys.fault("vision_feature_layer", f"expected an integer or a list of them, not {values['vision_feature_layer']!r}")
    strategy = keys.only("vision_feature_select_strategy", "default", "full")
    if strategy == "default" and kind == "siglip_vision_model":
        keys.fault("vision_feature_select_strategy", "'default' would drop the first patch of a tower without a class token")
    act, bias = keys.only("projector_hidden_act", "gelu", "linear"), keys.boolean("multimodal_projector_bias")
    token = keys.integer("image_token_id" if keys.given("image_token_id") else "image_token_index")
    keys.given("image_token_index")
    keys.finish()
    encoder = TOWER_READERS[kind](
        path=str(folder), feature_layers=tuple(layers), class_feature=strategy == "full" and kind != "siglip_vision_model"
    )
    fields = {item: getattr(decoder, item) for item in vars(decoder)}
    adapter = MLPConfig(bias=bias) if act == "gelu" else LinearConfig(bias=bias)
    try:
        return family, VLM(**fields, encoder=encoder, adapter=adapter, fusion=JointDecoder(), image_token=token)
    except ValueError as cause:
        raise Unsupported(f"{where}: {cause}") from cause


def _places(family: Family, model: VLM, tower: str) -> dict[str, TensorPlace]:
    """Global name -> place of every tensor; `tower` is before the names of the vision tower's."""
    from forge_models.hf.names import shapes_of

    found = {
        **text_places(family, text_decoder(model), TEXT),
        **tower_places(model.vision, tower),
    }
    for name, shape in shapes_of(model).items():
        if name.startswith("adapter."):
            _, _, at, slot = name.split(".")
            found[name] = TensorPlace(shape, (f"{PROJECTOR}linear_{int(at) + 1}.{slot}",))
    return found


def _identity(model: VLM) -> "dict[str, Tensor]":
    """The second matrix of a projector that has one, by name: it changes nothing."""
    import torch

    found = {f"{PROJECTOR}linear_2.weight": torch.eye(model.dim)}
    return found | ({f"{PROJECTOR}linear_2.bias": torch.zeros(model.dim)} if model.chosen_adapter.bias else {})


def _renamed(name: str) -> str:
    """The name that places have for a tensor of a folder of an older or a newer version of transformers."""
    name = name.removeprefix("model.")
    if name == "lm_head.weight":
        return HEAD
    if name.startswith(TEXT) and not name.startswith((f"{TEXT}model.", f"{TEXT}lm_head.")):
        return f"{TEXT}model.{name.removeprefix(TEXT)}"
    return name.replace(TOWER + INNER, TOWER, 1)
