"""The converter `hf`, chosen by `--from` and `--to`: text decoders, and models that other distributions register."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt

from forge_core.component import Component
from forge_core.errors import BrokenPlugin
from forge_core.machine import available_memory
from forge_core.protocols.weights import NO_EXTRAS, HfModel, Weights
from forge_core.registry import Registry
from forge_core.terminal import size
from forge_models.components.decoder import DecoderConfig
from forge_models.components.transformers import TransformersConfig
from forge_models.hf.causal_lm_classes import folder_refusal, record_of
from forge_models.hf.config import CONFIG, Unsupported, read_config
from forge_models.hf.families import FAMILIES
from forge_models.hf.reader import Folder, unknown_kind
from forge_models.hf.writer import write

if TYPE_CHECKING:
    from torch import Tensor


GROUP = "forge.hf_models"


@dataclass(frozen=True, kw_only=True)
class HfConverter(Component):
    """Hugging Face folders: config.json and safetensors; no pickle, no code of the model's author.

    Folders of other kinds than Forge's families are opened with their class of transformers, if that has been compared.
    """

    family: str | None = None
    """`model_type` to write, such as `llama`; by default that of the weights' origin, else the first that fits. Models other than
    text decoders are in the group `forge.hf_models`."""
    tokenizer: str | None = None
    """Folder whose tokenizer files are copied; by default the files that came with the weights."""
    max_shard_bytes: Annotated[int, Gt(0)] = 5_000_000_000
    """Maximum size of a file of tensors in bytes; a conversion holds this much in memory."""

    ignore: tuple[str, ...] = ()
    """Keys of `config.json` to ignore when reading: unknown keys, or keys of features that are not implemented. A key that
    determines what the model computes cannot be ignored."""

    def read(self, path: Path) -> Any:
        """Opens a folder; see `forge_models.hf.reader.Folder`.

        Raises:
            Unsupported: Forge cannot read the model, or transformers would load another one from the folder.
        """
        other = other_reader(path)
        if other is not None:
            return other.read(path, self.ignore)
        kind = read_config(path)["model_type"]
        if kind in FAMILIES:
            return Folder(path, self.ignore)
        if why := folder_refusal(kind):
            raise Unsupported(f"{path}: {why}; use another version of transformers")
        from forge_models.hf.causal_lm_weights import CausalLMFolder

        return CausalLMFolder(
            path, TransformersConfig(**{"folder": str(path), **TransformersConfig.described({"folder": str(path)})})
        )

    def write(self, path: Path, weights: Weights) -> None:
        """Writes a folder; see `forge_models.hf.writer.write`.

        Raises:
            Unsupported: the format cannot describe the model, or transformers would load another one.
        """
        tokenizer = None if self.tokenizer is None else Path(self.tokenizer)
        if getattr(weights.model, "lora", None) is not None:
            from forge_models.lora_weights import MergedWeights

            weights = MergedWeights(weights)  # the format has no adapters
        if type(weights.model) is DecoderConfig:
            write(path, weights, family=self.family, tokenizer=tokenizer, max_shard_bytes=self.max_shard_bytes)
        elif type(weights.model) is TransformersConfig:
            from forge_models.hf import causal_lm_weights

            if why := folder_refusal(weights.model.model_type):
                raise Unsupported(f"{why}; keep the checkpoint of Forge")
            causal_lm_weights.write(path, weights, tokenizer=tokenizer, max_shard_bytes=self.max_shard_bytes)
        else:
            chosen = _chosen(weights, self.family)
            chosen.write(path, weights, tokenizer=tokenizer, max_shard_bytes=self.max_shard_bytes)

    def reference(self, path: Path, tokens: "Tensor", extras: "Mapping[str, Tensor]" = NO_EXTRAS) -> "Tensor | str":
        """Returns the logits of transformers in fp32, or a text that says why they are not available."""
        needed = 2 * sum(file.stat().st_size for file in path.glob("*.safetensors"))
        free = available_memory()
        if free is not None and needed > free // 2:
            return f"the other library would need about {size(needed)}, {size(free)} are free"
        other = other_reader(path)
        if other is not None:
            return other.reference(path, tokens, extras)
        import torch

        classifies = any("ForSequenceClassification" in name for name in read_config(path).get("architectures") or ())
        model = opened(path, "AutoModelForSequenceClassification" if classifies else "AutoModelForCausalLM")
        if isinstance(model, str):
            return model
        with torch.no_grad():
            if classifies:  # the class itself returns the logits of the last token only
                return model.score(getattr(model, model.base_model_prefix)(tokens).last_hidden_state)
            return model(tokens).logits


def opened(path: Path, loader: str) -> Any:
    """Opens a folder in fp32 with a class of transformers, in evaluation mode; returns text if transformers is not installed."""
    import torch

    try:
        import transformers
    except ImportError:
        return "transformers is not installed"
    model = getattr(transformers, loader).from_pretrained(
        path,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        attn_implementation="eager",
        trust_remote_code=False,  # else transformers asks on a terminal whether the folder's code may run
    )
    # because grouped products need row sizes that are multiples of 16 bytes
    model.config.get_text_config()._experts_implementation = "eager"
    return model.eval()


def other_reader(path: Path) -> HfModel | None:
    """Returns the reader of a folder with a model other than a text decoder; None if it is one of the text families, or has a
    class of transformers that has been compared.

    Raises:
        Unsupported: no registered model has this `model_type`.
    """
    values = read_config(path)
    kind, registry = values.get("model_type"), Registry()
    if isinstance(kind, str) and kind in FAMILIES:
        return None
    others = registry.names(GROUP)
    if isinstance(kind, str) and kind not in others and (found := record_of(kind)) is not None and found[1]["alone"] is True:
        return None
    if not isinstance(kind, str) or kind not in others:
        raise unknown_kind(values, str(path / CONFIG), others)
    return registry.load(GROUP, kind)().build()


def _chosen(weights: Weights, wanted: str | None) -> HfModel:
    """Returns the writer of a model other than a text decoder: the wanted kind, else the kind that the weights came from if it
    can express the model, else the first kind that can.

    Raises:
        Unsupported: no kind can express the model; the message lists for each kind what it cannot express.
    """
    registry = Registry()
    known = registry.names(GROUP)
    if wanted is not None and wanted not in known:
        what = "is for decoders of text alone" if wanted in FAMILIES else "is not known"
        kind, names = type(weights.model).__name__, ", ".join(known) or "none"
        raise Unsupported(f"family {wanted!r} {what}; for a {kind} there are: {names}")
    first = weights.facts.family
    order = [wanted] if wanted is not None else [*([first] if first in known else []), *known]
    reasons, asked = [], []
    for name in dict.fromkeys(order):
        try:
            component = registry.load(GROUP, name)
        except BrokenPlugin:  # a broken plugin matters only if it was chosen
            if name in (wanted, first):
                raise
            continue
        model: HfModel = component().build()
        found = model.misfits(weights)
        if not found and name not in (wanted, first) and getattr(component, "own_code", False):
            asked.append(name)
        elif not found:
            return model
        reasons += [f"{name}:", *(f"  {reason}" for reason in found)] if found else []
    reasons += [f"--family {name} can, for those who have its package installed" for name in asked]
    raise Unsupported("\n  ".join([f"no {CONFIG} of the Hugging Face format can describe this model:", *reasons]))
