"""The converter `hf`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.machine.memory import available_memory
from forge_core.protocols.convert import Weights
from forge_core.terminal.quantities import size
from forge_models.hf.reader import Folder
from forge_models.hf.writer import write

if TYPE_CHECKING:
    from torch import Tensor


class HfConverter:
    """Reads and writes folders with `config.json` and safetensors."""

    def __init__(self, *, family: str | None, tokenizer: str | None, max_shard_bytes: int, ignore: Sequence[str]) -> None:
        self.family, self.tokenizer, self.max_shard_bytes, self.ignore = family, tokenizer, max_shard_bytes, ignore

    def read(self, path: Path) -> Folder:
        """Opens a folder; see `Folder`."""
        return Folder(path, self.ignore)

    def write(self, path: Path, weights: Weights) -> None:
        """Writes a folder; see `forge_models.hf.writer.write`."""
        tokenizer = None if self.tokenizer is None else Path(self.tokenizer)
        write(path, weights, family=self.family, tokenizer=tokenizer, max_shard_bytes=self.max_shard_bytes)

    def reference(self, path: Path, tokens: "Tensor") -> "Tensor | str":
        """Logits of transformers in fp32, or why there are none."""
        import torch

        try:
            from transformers import AutoModelForCausalLM
        except ImportError:
            return "transformers is not installed"
        needed = 2 * sum(file.stat().st_size for file in path.glob("*.safetensors"))
        free = available_memory()
        if free is not None and needed > free // 2:
            return f"transformers would need about {size(needed)}, {size(free)} are free"
        loader: Any = AutoModelForCausalLM
        model = loader.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, use_safetensors=True, attn_implementation="eager"
        )
        model.config._experts_implementation = "eager"  # grouped products need widths that are multiples of 16 bytes
        model.eval()
        with torch.no_grad():
            return model(tokens).logits
