"""Forge models as Auto classes of transformers. This module needs transformers; `forge_vlm.hf.register` imports it on use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import cached_file

from forge_models.hf.config import CONFIG
from forge_vlm.hf.component_tables import DESCRIPTION, MODEL_TYPE, model_of


def register() -> None:
    """Tells transformers about models of Forge: `AutoModelForImageTextToText.from_pretrained(folder)` opens them afterwards.

    `AutoConfig` and `AutoModelForCausalLM` know them, too. There is no processor: models take ids and pixels.
    """
    AutoConfig.register(MODEL_TYPE, ForgeConfig, exist_ok=True)
    AutoModelForImageTextToText.register(ForgeConfig, ForgeForImageTextToText, exist_ok=True)
    AutoModelForCausalLM.register(ForgeConfig, ForgeForImageTextToText, exist_ok=True)


class ForgeConfig(PretrainedConfig):
    """The content of `config.json`; its key `forge` describes the model."""

    model_type = MODEL_TYPE

    def __init__(self, forge: Mapping[str, Any] | None = None, **others: Any) -> None:
        self.forge = forge
        others.setdefault("tie_word_embeddings", bool((forge or {}).get("tied_embeddings", False)))
        super().__init__(**others)


class ForgeForImageTextToText(PreTrainedModel, GenerationMixin):
    """A `forge_vlm.VLM` as transformers opens it. Its modules have the names of the tensors in the folder.

    Rows are whole: none is padded, and `generate` computes each row anew for every token, without a cache.
    """

    _built: Any
    config_class = ForgeConfig
    base_model_prefix = ""
    _keys_to_ignore_on_load_missing = [r"\.load$"]  # noqa: RUF012 (transformers declares it so); a counter of training

    def __init__(self, config: ForgeConfig) -> None:
        super().__init__(config)
        built: Any = model_of({DESCRIPTION: config.forge}, _folder_of(config)).build()
        object.__setattr__(self, "_built", built)  # not a module of this one: its parts are
        for name, part in built.named_children():
            self.add_module(name, part)
        self._specs = built.specs()
        self._tied_weights_keys = dict(self._specs.ties)
        self._paths = {id(module): path for path, module in built.named_modules()}
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        images: Tensor | None = None,
        image_rows: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **given: Any,
    ) -> CausalLMOutput:
        """Logits (B, T, vocab) of tokens (B, T).

        `images` are (n, channels, height, width), prepared as `preprocessor_config.json` says, and `image_rows` (B, M) int64 the
        numbers of each row's images in their order, -1 where a row has fewer.

        Raises:
            TypeError: an argument that would change something, which this model does not have.
            ValueError: `attention_mask` leaves tokens out.
        """
        # None and False ask for nothing, and so does return_dict = True. All else would be passed over.
        if wrong := [name for name, value in given.items() if value is not None and value is not (name == "return_dict")]:
            raise TypeError(f"{', '.join(wrong)}: this model takes input_ids, images and image_rows alone, with no cache")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("attention_mask leaves tokens out: this model takes rows of one length, without padding")
        extras = {} if images is None else {"images": images, "image_rows": image_rows}
        return CausalLMOutput(logits=self._built(input_ids, **extras))

    def train(self, mode: bool = True) -> "ForgeForImageTextToText":
        """See `nn.Module`."""
        self._built.train(mode)
        return super().train(mode)

    def get_input_embeddings(self) -> nn.Module:
        """The table of tokens."""
        return self._built.embed

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self._built.head

    def _init_weights(self, module: nn.Module) -> None:
        """What the folder does not hold, such as counters of training, begins as the model's specs say."""
        path = self._paths.get(id(module))
        if path is None:
            return
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            whole = f"{path}.{name}" if path else name
            if whole in self._specs.ties or getattr(tensor, "_is_hf_initialized", False):
                continue
            init = self._specs.tensors[whole].init
            if init.kind == "normal":
                nn.init.normal_(tensor, std=init.std)
            else:
                nn.init.constant_(tensor, 1.0 if init.kind == "ones" else 0.0)

    def prepare_inputs_for_generation(self, input_ids: Tensor, *_: Any, **kwargs: Any) -> dict[str, Any]:
        """All of each row: nothing of it is kept. By the name `kwargs` transformers lets arguments of `forward` pass."""
        return {"input_ids": input_ids} | {name: kwargs.get(name) for name in ("images", "image_rows", "attention_mask")}

    def _expand_inputs_for_generation(self, *sizes: Any, images: Tensor | None = None, **given: Any) -> Any:
        # Copies of a row name the same images. (transformers declares `self` here as a class that only checkers know.)
        tokens, found = super()._expand_inputs_for_generation(*sizes, **given)  # type: ignore[misc]
        return tokens, found | {"images": images}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


def _folder_of(config: ForgeConfig) -> Path:
    """Where `config.json` is: a published tower has its keys there. A name on the hub leads to its copy on this machine."""
    name = config.name_or_path
    if not name or Path(name).is_dir():
        return Path(name or ".")
    return Path(str(cached_file(name, CONFIG))).parent
