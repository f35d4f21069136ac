"""Interfaces of weight formats: a model's description, and its tensors by global name, read in portions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from forge_core.component import Component

if TYPE_CHECKING:
    from torch import Tensor

NO_EXTRAS: "Mapping[str, Tensor]" = MappingProxyType({})
"""Extras of a model whose only inputs are tokens."""


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype (torch's name, such as `bfloat16`) of a tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightsInfo:
    """Metadata of weights.

    Attributes:
        step: number of optimizer steps that trained the weights.
        special_tokens: `bos_token_id`, `eos_token_id` and `pad_token_id`, if known.
        ends: ids that end generation, if they are not only `eos_token_id`.
        tokenizer: folder with the tokenizer's files.
        origin: description of the origin, for messages.
        family: name of the model type in the original format, used when the weights are converted back.
        run: directory of the run that trained the weights.
        recipe: recipe of that run, as plain tables.
        cursor: data position of that run (`forge_core.protocols.data.Cursor`).
        notes: one sentence for each part that was left out or ignored during reading.
        base: path or name of the weights that the training started from.
        history: sections of a model card about the training: data, evaluation, versions and recipe, as Markdown.
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
    base: str = ""
    history: str = ""


class Weights(Protocol):
    """The weights of one model in some format.

    Attributes:
        model: the component that builds the model.
        tensors: every parameter by global name, without tied copies.
        facts: metadata.
    """

    model: Component
    tensors: Mapping[str, StoredTensor]
    facts: WeightsInfo

    def read(self, names: Sequence[str]) -> "dict[str, Tensor]":
        """Returns whole tensors on the CPU. Callers request portions that fit in memory."""
        ...

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> "Tensor":
        """Returns the box of one tensor that begins at `offset`. Reads only the box, if the format allows it."""
        ...


class Converter(Protocol):
    """One format of weights. It refuses models that it cannot express, and names the reason.

    A format that rounds values, such as one that quantizes, also has a method `stored(weights)`, which returns the weights with
    the values that the format has for them. A component of a format that holds nothing but adapters declares
    `adapters_only = True`.
    """

    def read(self, path: Path) -> Weights:
        """Opens weights; tensors are read later."""
        ...

    def write(self, path: Path, weights: Weights) -> None:
        """Writes weights to a new path, portion by portion; an interrupted write leaves nothing under `path`.

        Raises:
            ForgeError: the format cannot express the model, or `path` exists.
        """
        ...

    def reference(self, path: Path, tokens: "Tensor", extras: "Mapping[str, Tensor]" = NO_EXTRAS) -> "Tensor | str":
        """Returns the logits (B, T, vocab) of the format's own library for `tokens` (B, T), or the reason why it cannot run.

        `extras` are further inputs of the model, such as images, by their names in the Forge model.
        """
        ...


class HfModel(Protocol):
    """One model type (`model_type` of the folder) in the Hugging Face format, for models other than plain text decoders.

    Only classes of the component's package open folders of a component with `own_code`; such folders are written only if the
    component is selected by name.
    """

    def misfits(self, weights: Weights) -> list[str]:
        """Returns one sentence for each option of a model that a folder of this type cannot express; empty if there is none."""
        ...

    def read(self, path: Path, ignore: Sequence[str] = ()) -> Weights:
        """Opens a folder; `ignore` names keys of its `config.json` to ignore."""
        ...

    def write(self, path: Path, weights: Weights, *, tokenizer: Path | None, max_shard_bytes: int) -> None:
        """Writes a folder; see `Converter.write`. The caller has checked `misfits`."""
        ...

    def reference(self, path: Path, tokens: "Tensor", extras: "Mapping[str, Tensor]" = NO_EXTRAS) -> "Tensor | str":
        """See `Converter.reference`."""
        ...

    def examples(self, folder: Path) -> Iterable[Component]:
        """Returns small models of this type, for checks; writes the files that they need into `folder`."""
        ...
