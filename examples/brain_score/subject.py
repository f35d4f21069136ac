"""A model of Forge as a subject of Brain-Score Language (Schrimpf et al., 2021): what their benchmarks ask a model for.

    from subject import ForgeSubject
    subject = ForgeSubject("runs/demo", {"language_system": "blocks.3.residual_after"})
    subject.start_neural_recording("language_system", "fMRI")
    subject.digest_text(["The quick brown fox", "jumps over the lazy dog"])["neural"]

It has the methods of `brainscore_language.artificial_subject.ArtificialSubject`, and gives the assemblies of brainio where
that is installed, else plain arrays of xarray with the same dimensions and coordinates. Parts of a text are read one after
the other, each with those before it as its context, joined by spaces. A part's neural value is that of its last token; its
reading time is the surprisal of its tokens in nats, NaN for the first token of a text, which nothing predicts.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forge_core import ForgeError, Registry
from forge_interp import capture, select_taps
from forge_models import evaluating
from forge_train import load_model, open_weights
from forge_train.inference import tokenizer_for

TASKS = ("next_word", "reading_times")


class ForgeSubject:
    """A run, a checkpoint or a folder in the Hugging Face format that reads texts."""

    def __init__(self, path: str | Path, regions: Mapping[str, str], name: str = "") -> None:
        """`regions`: which inner value stands for a region, such as `{"language_system": "blocks.3.residual_after"}`; see
        `forge-train probe MODEL --list`.

        Raises:
            ForgeError: the weights cannot be read, have no tokenizer, or an inner value does not exist.
        """
        registry = Registry()
        weights = open_weights(Path(path), registry)
        self._tokenizer = tokenizer_for(weights, None, registry, lambda _: None)
        self._model: Any = load_model(weights)
        self._regions, self._name = dict(regions), name or f"forge-{Path(path).name}"
        for value in self._regions.values():
            select_taps(self._model, [value], None, None)
        self._task: str | None = None
        self._recording: tuple[str, str] | None = None

    def identifier(self) -> str:
        """A name for tables of scores."""
        return self._name

    def start_behavioral_task(self, task: str) -> None:
        """From now on `digest_text` gives a behavior, too.

        Raises:
            ForgeError: the task is not one of `TASKS`.
        """
        if task not in TASKS:
            raise ForgeError(f"task {task!r} is not implemented; choose {' or '.join(TASKS)}")
        self._task = task

    def start_neural_recording(self, recording_target: str, recording_type: str) -> None:
        """From now on `digest_text` gives a recording, too.

        Raises:
            ForgeError: no inner value stands for the region.
        """
        if recording_target not in self._regions:
            raise ForgeError(f"no inner value stands for {recording_target!r}; there are {', '.join(self._regions)}")
        self._recording = recording_target, recording_type

    @torch.no_grad()
    def digest_text(self, text: str | Sequence[str]) -> dict[str, Any]:
        """Reads parts of a text: `behavior` (presentation) and `neural` (presentation, neuroid), as far as they were asked for.

        Raises:
            ForgeError: nothing was asked for, or the text has more tokens than the model takes.
        """
        if self._task is None and self._recording is None:
            raise ForgeError("nothing is recorded; call start_behavioral_task or start_neural_recording first")
        parts = [text] if isinstance(text, str) else list(text)
        read = [self._read(" ".join(parts[:number]), " ".join(parts[: number + 1])) for number in range(len(parts))]
        coordinates = {"stimulus": ("presentation", parts), "part_number": ("presentation", list(range(len(parts))))}
        found: dict[str, Any] = {}
        if self._task is not None:
            values = [behavior for behavior, _ in read]
            found["behavior"] = _assembly("BehavioralAssembly", values, coordinates, ["presentation"])
        if self._recording is not None:
            region, kind = self._recording
            values = np.stack([neural for _, neural in read if neural is not None])
            units = values.shape[1]
            neuroids = {
                "layer": ("neuroid", [self._regions[region]] * units),
                "region": ("neuroid", [region] * units),
                "recording_type": ("neuroid", [kind] * units),
                "neuroid_num": ("neuroid", list(range(units))),
                "neuroid_id": ("neuroid", [f"{self._regions[region]}--{unit}" for unit in range(units)]),
            }
            found["neural"] = _assembly("NeuroidAssembly", values, coordinates | neuroids, ["presentation", "neuroid"])
        return found

    def _read(self, before: str, whole: str) -> tuple[Any, np.ndarray | None]:
        """(behavior, neural value) of what `whole` has more than `before`."""
        ids, known = (list(map(int, self._tokenizer.encode(each))) for each in (whole, before))
        if not ids or len(ids) > self._model.shape.max_length:
            raise ForgeError(f"a text of {len(ids)} tokens cannot be read; the model takes 1 to {self._model.shape.max_length}")
        tokens = torch.tensor([ids])
        name = None if self._recording is None else self._regions[self._recording[0]]
        neural = None
        with evaluating(self._model):
            if name is None:
                logits = self._model(tokens)
            else:
                with capture(self._model, [name], positions="last") as seen:
                    logits = self._model(tokens)
                (value,) = (seen[each] for each in seen)
                neural = value.float().reshape(-1).numpy()
        return self._behavior(logits[0].float(), ids, min(len(known), len(ids) - 1)), neural

    def _behavior(self, logits: torch.Tensor, ids: list[int], start: int) -> Any:
        if self._task == "next_word":
            return self._tokenizer.decode([int(logits[-1].argmax())])
        if self._task is None:
            return None
        surprisal = -logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        own = surprisal[max(start - 1, 0) :]
        return float(own.sum()) if len(own) else math.nan


def _assembly(kind: str, values: Any, coordinates: dict[str, Any], dims: list[str]) -> Any:
    try:
        from brainio import assemblies  # pyright: ignore[reportMissingImports]
    except ImportError:
        import xarray

        return xarray.DataArray(values, coords=coordinates, dims=dims)
    return getattr(assemblies, kind)(values, coords=coordinates, dims=dims)
