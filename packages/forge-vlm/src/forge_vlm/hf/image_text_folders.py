"""Folders with an image-text class of transformers: weights under the names of the class, and its processor."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.component import Component
from forge_core.protocols.weights import NO_EXTRAS, Weights
from forge_models.hf import causal_lm_weights
from forge_models.hf.card import usage_of
from forge_models.hf.config import Unsupported, read_config
from forge_models.hf.converter import opened
from forge_vlm.components.image_text import ImageTextConfig
from forge_vlm.hf.image_text_classes import refusal

if TYPE_CHECKING:
    from torch import Tensor

LOADER = "AutoModelForImageTextToText"


class ImageTextFormat:
    """See `forge_core.protocols.weights.HfModel`."""

    def misfits(self, weights: Weights) -> list[str]:
        """See `HfModel`."""
        model = weights.model
        if not isinstance(model, ImageTextConfig):
            return [f"a {type(model).__name__} is not a model 'transformers_image_text'"]
        why = refusal(model.model_type)
        return [why] if why else []

    def read(self, path: Path, ignore: Sequence[str] = ()) -> Any:
        """See `HfModel`.

        Raises:
            Unsupported: the class is not trained, tensors do not fit, or keys are to be ignored.
        """
        if ignore:
            raise Unsupported(f"a class of transformers reads all keys of {path / 'config.json'}; ignore none")
        kind = read_config(path).get("model_type")
        if why := refusal(str(kind)):
            raise Unsupported(f"{path}: {why}; docs/models/image-text.md lists the classes")
        given = {"folder": str(path)}
        return causal_lm_weights.CausalLMFolder(path, ImageTextConfig(**{**given, **ImageTextConfig.described(given)}))

    def write(self, path: Path, weights: Weights, *, tokenizer: Path | None, max_shard_bytes: int) -> None:
        """See `HfModel`."""
        model = weights.model
        assert isinstance(model, ImageTextConfig)
        files: Mapping[str, str] = json.loads(model.processor or "{}")

        def write_processor(folder: Path) -> None:
            for name, text in files.items():
                if tokenizer is None or not (tokenizer / name).is_file():
                    (folder / name).write_text(text, encoding="utf-8")

        causal_lm_weights.write(
            path,
            weights,
            tokenizer=tokenizer,
            max_shard_bytes=max_shard_bytes,
            usage=usage_of(LOADER),
            texts=write_processor,
        )

    def reference(self, path: Path, tokens: "Tensor", extras: "Mapping[str, Tensor]" = NO_EXTRAS) -> "Tensor | str":
        """See `HfModel`."""
        return self.library_logits(path, tokens, extras)

    def library_logits(
        self,
        path: Path,
        tokens: "Tensor",
        extras: "Mapping[str, Tensor]" = NO_EXTRAS,
        changed: Callable[[Any], Any] = lambda model: model,
    ) -> "Tensor | str":
        """Returns the logits of transformers in fp32, or a text that says why they are not available.

        Args:
            path: folder of the model.
            tokens: (B, T) int64.
            extras: images, and their rows.
            changed: what the model of transformers becomes before it runs, such as one with an adapter.
        """
        import torch

        from forge_vlm.hf.image_arguments import ImageArguments
        from forge_vlm.hf.image_text import MARKS

        model = opened(path, LOADER)
        if isinstance(model, str):
            return model
        images = ImageArguments.of(model.config, extras["images"].shape[1] - 1 if "images" in extras else 1)
        from inspect import signature

        marks = images.marks(tokens, None)
        given = {name: marks for name in MARKS if name in signature(type(model).forward).parameters}
        if "images" in extras:
            given |= images.arguments(extras["images"], torch.float32)
        with torch.no_grad():
            return changed(model)(input_ids=tokens, use_cache=False, **given).logits

    def examples(self, folder: Path) -> Iterable[Component]:
        """See `HfModel`."""
        from forge_vlm.components.image_text import example

        return (example(),)
