"""What converters of weight formats agree on: a model's description, and its tensors by global name, read in portions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from forge_core.component import Component

if TYPE_CHECKING:
    from torch import Tensor

NO_EXTRAS: "Mapping[str, Tensor]" = MappingProxyType({})
"""Of a model that is given tokens alone."""


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype (torch's name, such as `bfloat16`) of a tensor that was not read yet."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightsInfo:
    """What travels with weights in addition to tensors.

    Attributes:
        step: optimizer steps behind the weights.
        special_tokens: `bos_token_id`, `eos_token_id` and `pad_token_id` where they are known.
        ends: ids at which generation ends where they are not just `eos_token_id`.
        tokenizer: folder that holds the tokenizer's files.
        origin: where the weights come from.
        family: what the format that they come from calls this kind of model; it has a say when they go back.
        run: directory of the run that they come from.
        recipe: of that run, as plain tables.
        cursor: how far it had read its data (`forge_core.protocols.data.Cursor`).
        notes: what was left out or ignored when they were read, one sentence each.
    """

    step: int = 0
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    tokenizer: Path | None = None
    origin: str = ""
    family: str = ""
    run: Path | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    cursor: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Weights(Protocol):
    """The weights of one model in some format.

    Attributes:
        model: the component that builds the model.
        tensors: every parameter by global name; a tied copy is not repeated.
        facts: what travels along.
    """

    model: Component
    tensors: Mapping[str, StoredTensor]
    facts: WeightsInfo

    def read(self, names: Sequence[str]) -> "dict[str, Tensor]":
        """Whole tensors, on the CPU. Callers ask for portions that fit in memory."""
        ...

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> "Tensor":
        """The box of one tensor that begins at `offset`; the rest is not read where the format allows that."""
        ...


class Converter(Protocol):
    """One format of weights. What it cannot express it refuses by name."""

    def read(self, path: Path) -> Weights:
        """Opens weights; tensors are read later."""
        ...

    def write(self, path: Path, weights: Weights) -> None:
        """Writes weights to a new place, a portion at a time; an interrupted write leaves nothing under `path`.

        Raises:
            ForgeError: the format cannot say what the model is, or `path` is taken.
        """
        ...

    def reference(self, path: Path, tokens: "Tensor", extras: "Mapping[str, Tensor]" = NO_EXTRAS) -> "Tensor | str":
        """Logits (B, T, vocab) of the format's own library for `tokens` (B, T), or why there are none.

        `extras` are the further inputs of the model, such as images, by the names that our model has for them.
        """
        ...


class HfModel(Protocol):
    """One kind of model in the Hugging Face format that is more than a decoder of text, by the `model_type` of its folder.

    Folders of a component with `own_code` are opened by classes of its package alone; they are written only where they are named.
    """

    def misfits(self, weights: Weights) -> list[str]:
        """What a folder of this kind cannot say about a model, one sentence for each option; empty when it says all."""
        ...

    def read(self, path: Path, ignore: Sequence[str] = ()) -> Weights:
        """Opens a folder; `ignore` names keys of its `config.json` that are left out."""
        ...

    def write(self, path: Path, weights: Weights, *, tokenizer: Path | None, max_shard_bytes: int) -> None:
        """Writes a folder, as `Converter.write`; the caller asked `misfits` before."""
        ...

    def reference(self, path: Path, tokens: "Tensor", extras: "Mapping[str, Tensor]" = NO_EXTRAS) -> "Tensor | str":
        """As `Converter.reference`."""
        ...

    def examples(self, folder: Path) -> Iterable[Component]:
        """Small models that it describes, for checks; files that they need go into `folder`."""
        ...
