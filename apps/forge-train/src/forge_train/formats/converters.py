"""Components of the formats of weights that Forge reads and writes, and the detection of a format.

The formats are Forge's own, and tensors under the model's names.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from forge_core.component import Component

PEFT_CONFIG = "adapter_config.json"
HF_CONFIG = "config.json"
DCP_METADATA = ".metadata"
TORCH_SUFFIXES = (".pt", ".pth", ".bin")
GGUF_MAGIC = b"GGUF"
NANOGPT_FILE = "ckpt.pt"
"""What nanoGPT writes into its `out_dir`."""


def format_of(where: str | Path) -> str:
    """Returns the format of the weights at `where`, detected from its files; `forge` for runs, checkpoints and missing paths."""
    from forge_ckpt.store.objects import is_url

    if is_url(where):
        return "forge"
    path = Path(where)
    marks = {"peft": (path / PEFT_CONFIG).is_file(), "hf": (path / HF_CONFIG).is_file(), "safetensors": _is_plain(path)}
    marks["dcp"] = (path / DCP_METADATA).is_file()
    marks["gguf"] = _is_gguf(path)
    named = any((path / name).is_file() for name in ("model.pt", NANOGPT_FILE))
    marks["torch"] = named or (path.is_file() and path.suffix in TORCH_SUFFIXES)
    return next((kind for kind, found in marks.items() if found), "forge")


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def _is_plain(path: Path) -> bool:
    return path.suffix == ".safetensors" if path.is_file() else any(path.glob("*.safetensors"))


@dataclass(frozen=True, kw_only=True)
class Forge(Component):
    """Forge's checkpoints: a run's directory, a directory of checkpoints, or one checkpoint, of any layout."""

    implementation: ClassVar[str] = "forge_train.formats.forge:ForgeConverter"

    weights: str = "model"
    """Weights to read: `model`, or a set that a hook saved, such as their average `ema`."""
    base: str | None = None
    """Where the base of an adapter is, if no longer where its run had it: a folder, run or checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Safetensors(Component):
    """Safetensors with the names of the model's tensors: `model.safetensors`, or shards and their index."""

    implementation: ClassVar[str] = "forge_train.formats.plain:PlainConverter"

    max_shard_bytes: Annotated[int, Gt(0)] = 5_000_000_000
    """Maximum size of one file in bytes; also the memory that a conversion needs."""
    recipe: str | None = None
    """TOML file or preset whose `[model]` the tensors are of, for files that Forge did not write."""
    prefix: str = ""
    """What stands before every name in the files, such as `model.`; tensors without it are left out."""


@dataclass(frozen=True, kw_only=True)
class Dcp(Component):
    """Checkpoints of `torch.distributed.checkpoint`, with the names of the model's tensors at the top level."""

    implementation: ClassVar[str] = "forge_train.formats.torch_files:DcpConverter"

    recipe: str | None = None
    """TOML file or preset whose `[model]` the tensors are of, for files that Forge did not write."""
    prefix: str = ""
    """What stands before every name in the files, such as `model.`; tensors without it are left out."""
    names: Literal["forge", "kempnerforge", "torchtitan"] = "forge"
    """Whose names, layouts and folders the checkpoint has; those of other frameworks can only be read."""
    unsafe_pickle: bool = False
    """Also unpickle objects that are not tensors, in a separate process. This can run any code of the author as this user."""


@dataclass(frozen=True, kw_only=True)
class Torch(Component):
    """Files of `torch.save` with a dict of tensors; the names of nested dicts are joined with dots."""

    implementation: ClassVar[str] = "forge_train.formats.torch_files:TorchConverter"

    recipe: str | None = None
    """TOML file or preset whose `[model]` the tensors are of, for files that Forge did not write."""
    prefix: str = ""
    """What stands before every name in the files, such as `model.`; tensors without it are left out."""
    names: Literal["forge", "nanogpt"] = "forge"
    """Whose names and layouts the file has; those of nanoGPT can only be read."""
    unsafe_pickle: bool = False
    """Also unpickle objects that are not tensors, in a separate process. This can run any code of the author as this user."""
