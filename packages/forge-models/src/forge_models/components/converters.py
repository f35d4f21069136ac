"""Foreign formats of weights, chosen by `--from` and `--to`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from forge_core.component import Component

if TYPE_CHECKING:
    from forge_models.hf.converter import HfConverter


@dataclass(frozen=True, kw_only=True)
class Hf(Component):
    """Hugging Face folders: config.json and safetensors; no pickle, no code of the model's author."""

    family: str | None = None
    """`model_type` to write, such as `llama`; by default where the weights came from, else the first that fits. What is more than
    a decoder of text is one of the group `forge.hf_models`."""
    tokenizer: str | None = None
    """Folder whose tokenizer files are copied; by default those that came with the weights."""
    max_shard_bytes: Annotated[int, Gt(0)] = 5_000_000_000
    """Largest file of tensors; also what a conversion holds in memory."""

    ignore: tuple[str, ...] = ()
    """Keys of a `config.json` that are left out when it is read: keys that are not known, or of things that are not implemented.
    A key that decides what the model computes cannot be ignored."""

    def build(self) -> "HfConverter":
        from forge_models.hf.converter import HfConverter

        return HfConverter(family=self.family, tokenizer=self.tokenizer, max_shard_bytes=self.max_shard_bytes, ignore=self.ignore)
