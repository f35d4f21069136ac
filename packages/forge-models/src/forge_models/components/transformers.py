"""Any causal language model of transformers, chosen by `[model] name = "transformers"`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from forge_core.component import FREE, IDENTITY, Component, Place
from forge_core.features import Feature
from forge_models.components.lora import LoRAConfig
from forge_models.hf.config import Unsupported, read_config

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forge_models.hf import causal_lm, causal_lm_weights


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(Component):
    """A causal language model as transformers defines it, with the names of its tensors and its own forward.

    Use it for models that `[model] name = "decoder"` does not describe. The page `docs/models/transformers.md` lists for every
    class in which layouts it has been compared with one process; others are refused.
    """

    key_class: ClassVar = IDENTITY
    feature: ClassVar[str] = "transformers"

    folder: Annotated[str | None, FREE, Place] = None
    """Folder in the Hugging Face format with the configuration and, unless `weights` is "draw", the weights to start from."""
    config: str = ""
    """Content of `config.json`; taken from `folder` when absent."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keys that replace those of `config.json`, such as { num_hidden_layers = 4 }."""
    weights_from: Annotated[Literal["folder", "draw"], FREE] = "folder"
    """Where a new run's weights come from: those of the folder, or drawn from `job.seed` as the class initializes them."""

    lora: Annotated[LoRAConfig | None, Feature("lora", unless=None, plane="model")] = None
    """Low-rank adapters; all other parameters are then a frozen base. When absent, all parameters are trained."""

    @classmethod
    def described(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys that the folder of a recipe determines, for those that the recipe does not have.

        Raises:
            Unsupported: the folder has no `config.json`.
        """
        folder = given.get("folder")
        if not isinstance(folder, str) or not folder.strip() or given.get("config"):
            return {}
        return {"config": json.dumps(read_config(Path(folder)), sort_keys=True)}

    @classmethod
    def examples(cls, folder: Path) -> "Iterable[TransformersConfig]":
        """Returns a small Llama with its own attention of transformers."""
        yield cls(config=json.dumps(SMALL), weights_from="draw")

    def __post_init__(self) -> None:
        if not self.config:  # which `build` and a check refuse
            return
        try:
            values = json.loads(self.config)
        except ValueError as cause:
            raise ValueError(f"config is not JSON: {cause}") from cause
        if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
            raise ValueError("config is not the content of a config.json: it has no model_type")
        if self.weights_from == "folder" and self.folder is None:
            raise ValueError("weights_from = 'folder' needs folder; give one, or set weights_from = 'draw'")

    def _value(self, *keys: str) -> Any:
        """Returns the first of some keys that the configuration has, in `settings`, itself, or its text model."""
        values = json.loads(self.config or "{}")
        text = values.get("text_config")
        places = (self.settings, values, text if isinstance(text, dict) else {})
        return next((place[key] for place in places for key in keys if place.get(key) is not None), None)

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None if the configuration leaves it to transformers."""
        return self._value("vocab_size")

    @property
    def max_length(self) -> int | None:
        """Maximum sequence length in tokens; None if the configuration has none."""
        return self._value("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")

    @property
    def experts(self) -> int:
        """Number of stacked experts in a layer; 0 if the configuration names none."""
        return self._value("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 0

    @property
    def model_type(self) -> str:
        """Name of the architecture in transformers; empty without a configuration."""
        return json.loads(self.config)["model_type"] if self.config else ""

    def hollow(self) -> Any:
        """Returns the module of the class on the meta device.

        Raises:
            Unsupported: transformers cannot build it.
        """
        from forge_models.hf.causal_lm_anatomy import built, read_settings

        return built(read_settings(self.config, self.settings))

    def weights(self) -> "causal_lm_weights.CausalLMFolder | None":
        """Returns the weights that a new run starts from; None if they are drawn.

        Raises:
            Unsupported: tensors of the folder do not fit the model.
        """
        if self.weights_from == "draw" or self.folder is None:
            return None
        from forge_models.hf.causal_lm_weights import CausalLMFolder

        return CausalLMFolder(Path(self.folder), replace(self, lora=None))

    def reopened(self, path: Path) -> "causal_lm_weights.CausalLMFolder":
        """Returns the weights of a folder that was written for this model, under the names of its class."""
        from forge_models.hf.causal_lm_weights import CausalLMFolder

        return CausalLMFolder(path, replace(self, lora=None))

    def build(self) -> "causal_lm.CausalLM":
        """
        Raises:
            Unsupported: there is no configuration, or Forge cannot train its class.
        """
        if not self.config:
            raise Unsupported(MISSING)
        from forge_models.hf import causal_lm
        from forge_models.hf.causal_lm_classes import record_of

        found = record_of(self.model_type)
        packs = found is not None and found[1].get("packed") is True
        model = causal_lm.causal_lm(self.config, self.settings, drawn=self.weights_from == "draw", packs=packs)
        return self.adapted(model)

    def adapted(self, model: Any) -> Any:
        """Returns a built model, with adapters if `lora` asks for them.

        Raises:
            Unsupported: the class cannot have these adapters.
        """
        if self.lora is not None and self.lora.base_format != "full":
            raise Unsupported(
                f"model.lora.base_format = {self.lora.base_format!r} is for the families that Forge implements, and a class of "
                "transformers is none; use model.from_hf, or base_format = 'full'"
            )
        if self.lora is not None and self.lora.train:
            raise Unsupported(
                f"model.lora.train = {list(self.lora.train)} is for the families that Forge implements, and a class of "
                "transformers is none; use model.from_hf, or remove the key"
            )
        if self.lora is not None:
            from forge_models.hf.causal_lm_lora import attach

            attach(model, self.lora)
        return model


MISSING = "model.folder is missing: give a folder in the Hugging Face format, or model.config, the content of its config.json"
SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""The configuration of `TransformersConfig.examples`."""
