"""Cross-attention as `MllamaForCausalLM` (Llama 3.2 Vision, 2024): the text part there, encoder and adapter next to it.

    model                          folder
    blocks.3                       model.layers.4: before the last of every 4 layers stands a cross layer, which counts
    blocks.3.cross                 model.layers.3
    embed                          model.embed_tokens, with 8 rows more, which are 0
    encoder, adapter               vision/, which `load_vision` opens: the tower of Llama 3.2 is another one

transformers lets text before the first image of a row see images in part (its issue 39379); here such text sees nothing. Rows
that are compared begin with their image, or have none.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from forge_core.component import Component
from forge_core.protocols.weights import NO_EXTRAS, StoredTensor, Weights
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.hf.card import usage_of
from forge_models.hf.config import CONFIG, Keys, Unsupported, read_config
from forge_models.hf.converter import opened
from forge_models.hf.family import Family, config_of, decoder_of, misfits, read_base, read_heads, write_base
from forge_models.hf.names import DERIVED, TensorPlace, shapes_of
from forge_models.hf.reader import SINGLE, CheckpointTensors, facts_in
from forge_models.hf.writer import write_folder, write_json
from forge_vlm.components.adapters import MLPConfig
from forge_vlm.components.encoders import ViT
from forge_vlm.components.fusions import CrossAttention
from forge_vlm.components.model import VLM
from forge_vlm.hf.auto import vision_keys, vision_misfits, write_preprocessor
from forge_vlm.hf.component_tables import DESCRIPTION, component_of, table_of
from forge_vlm.hf.component_tables import MODEL_TYPE as VISION_MODEL_TYPE
from forge_vlm.hf.processors import NONE, tell
from forge_vlm.hf.text_and_vision import text_decoder, text_places

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MODEL_TYPE, ARCHITECTURE = "mllama_text_model", "MllamaForCausalLM"
VISION = "vision"
"""Folder with encoder and adapter."""
MORE_ROWS = 8
"""Of the embedding, behind those of the vocabulary."""
CROSS = {
    "attention_gate": "cross_attn_attn_gate",
    "mlp_gate": "cross_attn_mlp_gate",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "cross_attn",
    "mlp": "mlp",
}
"""Parts of a cross block -> their names there."""
USAGE = f"""{usage_of(ARCHITECTURE)}
from forge_vlm.hf import load_vision  # pip install forge-vlm

states = load_vision("path/of/this/folder")(images)  # cross_attention_states of rows with one image
"""


class Text(Family):
    """The text part: a Llama with cross layers between its layers."""

    model_type = MODEL_TYPE
    architecture = ARCHITECTURE
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    ignores: ClassVar = {"dropout": (None, 0), "image_token_index": (None,)}

    def __init__(self, every: int = 0) -> None:
        """`every`: of the fusion; a reader finds it."""
        self.every = every

    def read(self, keys: Keys) -> dict[str, Any]:
        """See `Family`; leaves `every` as the file says."""
        fields: dict[str, Any] = read_base(keys, theta=500000.0) | read_heads(keys) | {"attention": GQA()}
        keys.only("tie_word_embeddings", False)
        cross, total = keys.get("cross_attention_layers"), fields["layers"]
        listed = cross if isinstance(cross, list) else []
        layers = total - len(listed)
        found = [every for every in range(1, layers + 1) if cross_layers(layers, every) == listed]
        if not listed or not found:
            keys.fault(
                "cross_attention_layers", f"{cross!r}: only cross layers before the last of every so many layers are implemented"
            )
            return fields
        self.every = found[-1]
        return fields | {"layers": layers}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        """See `Family`."""
        written, cross = write_base(self, decoder), cross_layers(decoder.layers, self.every)
        written["rope_scaling"] = written["rope_scaling"] or {"rope_type": "default"}  # older versions look into it
        del written["attention_dropout"]
        return written | {"num_hidden_layers": decoder.layers + len(cross), "cross_attention_layers": cross}


class Mllama:
    """See `forge_core.protocols.weights.HfModel`."""

    def misfits(self, weights: Weights) -> list[str]:
        """See `HfModel`."""
        if type(weights.model) is not VLM:
            return [f"a {type(weights.model).__name__} is not a model 'vlm'"]
        return [*_misfits(weights.model)]

    def read(self, path: Path, ignore: Sequence[str] = ()) -> Any:
        """See `HfModel`."""
        return MllamaFolder(path, ignore)

    def write(self, path: Path, weights: Weights, *, tokenizer: Path | None, max_shard_bytes: int) -> None:
        """See `HfModel`."""
        model = weights.model
        assert isinstance(model, VLM)
        places = _places(model)
        config = config_of(Text(model.chosen_fusion.every), text_decoder(model)) | {"image_token_index": model.placeholder}
        write_folder(
            path,
            weights,
            {name: place for name, place in places.items() if not _of_vision(name)},
            config,
            tokenizer=tokenizer,
            max_shard_bytes=max_shard_bytes,
            usage=USAGE,
            required=("bos_token_id",),
            texts=lambda folder: _write_others(folder, weights, model),
        )

    def reference(self, path: Path, tokens: "Tensor", extras: "Mapping[str, Tensor]" = NO_EXTRAS) -> "Tensor | str":
        """See `HfModel`: transformers for the text part, `load_vision` for images. Rows begin with their images."""
        import torch

        model = opened(path, ARCHITECTURE)
        if isinstance(model, str):
            return model
        vision, logits = load_vision(path, torch.float32), torch.zeros(*tokens.shape, model.vocab_size)
        rows = extras.get("image_rows", torch.full((len(tokens), 1), -1))
        with torch.no_grad():
            for row, numbers in enumerate(rows):
                given = {}
                if (shown := numbers[numbers >= 0]).numel():
                    states = vision(extras["images"][shown])
                    seen = _seen(tokens[row].tolist(), read_config(path)["image_token_index"], states.shape[1])
                    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
                    given = {"cross_attention_states": states.flatten(0, 1)[None], "cross_attention_mask": mask[None, None]}
                logits[row] = model(tokens[row : row + 1], **given).logits[0]
        return logits

    def examples(self, folder: Path) -> Iterable[Component]:
        """See `HfModel`."""
        sizes: dict[str, Any] = {"dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "vocab_size": 40}
        vision: dict[str, Any] = {"encoder": ViT(size=8, patch=4, dim=8, layers=1, heads=2), "adapter": MLPConfig()}
        yield VLM(**sizes, max_length=64, **vision, fusion=CrossAttention(every=2))


class MllamaFolder:
    """`Weights` of such a folder: a text part of transformers' layout, and encoder and adapter in `vision`."""

    def __init__(self, folder: Path, ignore: Sequence[str] = ()) -> None:
        """Opens and checks everything but the values.

        Raises:
            ConfigError, Unsupported: a key, a tensor or a file that is not understood, missing, or left over.
        """
        values, where, family = read_config(folder), str(folder / CONFIG), Text()
        token = values.pop("image_token_index", None)
        decoder = decoder_of(family, values, where, ignore)
        if type(token) is not int or not (folder / VISION / CONFIG).is_file():
            raise Unsupported(
                f"{folder} is the text part of a model alone; encoder and adapter are in {VISION}/ of a folder that Forge wrote"
            )
        parts = component_of(read_config(folder / VISION).get(DESCRIPTION), folder / VISION)
        fields = {name: getattr(decoder, name) for name in vars(decoder)}
        fields |= {"encoder": parts["encoder"], "adapter": parts["adapter"]}
        self.model: Component = VLM(**fields, fusion=CrossAttention(every=family.every), image_token=token)
        places = _places(self.model)
        self._parts = (CheckpointTensors(folder), CheckpointTensors(folder / VISION))
        self.tensors: Mapping[str, StoredTensor] = {}
        for part, vision in zip(self._parts, (False, True), strict=True):
            mine = {name: place for name, place in places.items() if _of_vision(name) == vision}
            known = {place.names[0] for place in mine.values()}
            part.match(mine, {name for name in part.names if name not in known and not name.endswith(DERIVED)})
            self.tensors = {**self.tensors, **part.tensors}
        self.facts = facts_in(folder, values, MODEL_TYPE, ignore)

    def read(self, names: Sequence[str]) -> "dict[str, Tensor]":
        """Whole tensors by global name."""
        text, vision = self._parts
        return text.read([name for name in names if not _of_vision(name)]) | vision.read(list(filter(_of_vision, names)))

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> "Tensor":
        """The box of one tensor that begins at `offset`."""
        return self._parts[_of_vision(name)].box(name, offset, extent)


def load_vision(folder: str | Path, dtype: "torch.dtype | None" = None) -> "nn.Module":
    """Encoder and adapter of a folder, in evaluation: images (n, channels, height, width) to (n, per_image, dim), the
    `cross_attention_states` of the text part.

    Args:
        folder: as Forge wrote it, with text part and `vision`.
        dtype: of the parameters; by default the one that each was stored in.

    Raises:
        ConfigError, Unsupported: see `MllamaFolder`.
    """
    import torch
    from torch import nn

    weights = MllamaFolder(Path(folder))
    model: Any = weights.model
    with torch.device("meta"):
        built = model.build()
    vision = nn.Sequential(OrderedDict(encoder=built.encoder, adapter=built.adapter))
    tensors = weights.read([name for name in weights.tensors if _of_vision(name)])
    vision.load_state_dict({name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}, assign=True)
    return vision.eval()


def cross_layers(layers: int, every: int) -> list[int]:
    """Places of cross layers among all, with one before the last of every `every` of `layers` layers."""
    return [layer + number for number, layer in enumerate(range(every - 1, layers, every))]


def _misfits(model: VLM) -> Iterator[str]:
    """One sentence for each option of the recipe that this layout cannot hold."""
    if not isinstance(model.chosen_fusion, CrossAttention):
        yield f"fusion = {type(model.chosen_fusion).__name__}: Mllama is CrossAttention"
        return
    if model.modalities:
        yield f"modalities = {', '.join(model.modalities)}: Mllama has text and images"
    if model.tied_embeddings:
        yield f"tied_embeddings = True: the embedding of Mllama has {MORE_ROWS} rows more than its head"
    untied = replace(text_decoder(model), tied_embeddings=False)
    yield from misfits(Text(model.chosen_fusion.every), untied)
    yield from vision_misfits(model)


def _of_vision(name: str) -> bool:
    return name.startswith(("encoder.", "adapter."))


def _places(model: VLM) -> dict[str, TensorPlace]:
    """Global name -> place of every tensor; those of encoder and adapter lie in another folder."""
    found, cross = {}, cross_layers(model.layers, model.chosen_fusion.every)
    for name, shape in shapes_of(model).items():
        if _of_vision(name):
            found[name] = TensorPlace(shape, (name,))
        elif ".cross." in name:
            _, layer, _, part, *rest = name.split(".")
            at = cross[(int(layer) + 1) // model.chosen_fusion.every - 1]
            found[name] = TensorPlace(shape, (".".join(["model.layers", str(at), CROSS[part], *rest]),))
    decoder = text_decoder(model)
    for name, place in text_places(Text(), decoder, "").items():
        if name.startswith("blocks."):
            layer = int(name.split(".")[1])
            at = layer + (layer + 1) // model.chosen_fusion.every
            place = replace(place, names=(place.names[0].replace(f"layers.{layer}.", f"layers.{at}.", 1),))
        if name == "embed.weight":
            place = replace(place, fused=(0, 0, model.vocab_size + MORE_ROWS))
        found[name] = place
    return found


def _write_others(folder: Path, weights: Weights, model: VLM) -> None:
    _write_vision(folder / VISION, weights, model)
    why = "the processor of Mllama cuts images for another tower"
    tell(folder, NONE.format(why=why))


def _write_vision(folder: Path, weights: Weights, model: VLM) -> None:
    """Writes encoder and adapter."""
    from safetensors.torch import save_file

    folder.mkdir()
    tensors = weights.read([name for name in weights.tensors if _of_vision(name)])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / SINGLE), metadata={"format": "pt"})
    parts = {"encoder": table_of(model.vision), "adapter": table_of(model.chosen_adapter)}
    config = {"architectures": ["Vision"], "model_type": VISION_MODEL_TYPE}
    write_json(folder / CONFIG, {**config, DESCRIPTION: parts, **vision_keys(model)})
    write_preprocessor(folder, model)


def _seen(tokens: list[int], image_token: int, per_image: int) -> "Tensor":
    """(T, images * per_image) bool: what each token sees of its row's images, by the rule of transformers' processor."""
    import torch
    from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

    spans = get_cross_attention_token_mask(tokens, image_token)
    seen = torch.zeros(len(tokens), len(spans), dtype=torch.bool)
    for image, (first, end) in enumerate(spans):
        seen[first : len(tokens) if end == -1 else end, image] = True
    return seen.repeat_interleave(per_image, 1)
