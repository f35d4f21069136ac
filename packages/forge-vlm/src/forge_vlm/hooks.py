"""Hook `modalities`: loss, accuracy and share of each modality, the gates of cross blocks, and what images are worth."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from forge_core.batch import IGNORE, Batch
from forge_core.component import FREE, Component
from forge_core.logits import chunk_rows
from forge_core.protocols.data import EvaluationSet
from forge_core.protocols.model import LossTerms
from forge_core.protocols.run import Hook, Run, StepResult
from forge_vlm.context import Modalities
from forge_vlm.images.pixels import split_native
from forge_vlm.model import VisionLanguageModel


@dataclass(frozen=True, kw_only=True)
class ModalityStatistics(Component):
    """What each modality has of a vision-language model: loss and accuracy on held-out sets, what images are worth there, shares
    of the training tokens, and the gates of cross blocks. Loads of experts by modality are what hook `routing` logs."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 500
    """Steps from one measurement to the next; one more follows the last step."""
    batches: Annotated[int, Ge(0)] = 8
    """Micro-batches of each set of `[data.evaluation]` that a rank evaluates, twice where they have images; 0 = none."""

    def build(self) -> "Hook":

        return ModalitiesHook(every=self.every, batches=self.batches)


GATES = {".cross.attention_gate": "attention", ".cross.mlp_gate": "mlp"}
"""How parameters of gates are called, and their part of a block."""


class ModalitiesHook(Hook):
    """Every N steps and after the last one, on all ranks together:

    `modality/NAME/share` (of the step's training tokens, paddings left out); of each held-out set `modality/SET/NAME/loss` (nats
    per token whose label is of the modality) and `.../accuracy` (share of these labels that have the largest logit); where it has
    images, `modality/SET/image_gain`: the loss with the images of other rows less that with the right ones, in nats per token of
    the rows whose images are others; and `gate/blocks.N/attention` and `.../mlp`, the tanh of the gates of a cross block.

    Rows are given images of rows of the same rank, so other numbers of data ranks give other pairs. Of another model than a
    vision-language one nothing is measured.
    """

    observes = True

    def __init__(self, every: int = 500, batches: int = 8) -> None:
        self.every, self.batches = every, batches
        self.acted = -1

    def after_step(self, run: Run, result: StepResult) -> None:
        """Measures when due."""
        if run.state.step % self.every == 0:
            self._once(run)

    def finish(self, run: Run) -> None:
        """Measures the last weights, unless the last step did."""
        self._once(run)

    def _once(self, run: Run) -> None:
        known = modalities_of(run)
        if known is None or run.state.step == self.acted:
            return
        self.acted = run.state.step
        run.watch.enter(f"hook modalities after step {run.state.step}", "modalities")
        run.judge()
        started = perf_counter()
        values = token_shares(run, known) | gate_values(run)
        for name, held_out in run.evaluations.items() if self.batches else ():
            values |= self._evaluated(run, known, name, held_out)
        run.measured.update({name: (run.state.step, value) for name, value in values.items()})
        run.log(values)
        run.paused += perf_counter() - started

    def _evaluated(self, run: Run, known: Modalities, name: str, held_out: EvaluationSet) -> dict[str, float]:
        """Collective."""
        topology, objective = run.topology, ModalityObjective(known)
        every = held_out.batches(topology.data_rank, topology.data_size, run.job.train.micro_batch)
        batches = list(islice(every, self.batches))
        found = run.step.evaluate(batches, objective, objective.metrics)
        values: dict[str, float] = {}
        for modality in known.names:
            if count := found.metrics[f"tokens/{modality}"]:
                values[f"modality/{name}/{modality}/loss"] = found.metrics[f"loss/{modality}"] / count
                values[f"modality/{name}/{modality}/accuracy"] = found.metrics[f"correct/{modality}"] / count
        others, mine = swap_images(batches, run.model.parts[0].context.varies)
        labels = torch.full((), float(mine if _counts_its_rows(run) else 0), dtype=torch.float64, device=topology.device)
        if count := float(topology.all_reduce(labels)):
            total = sum(found.metrics[f"loss/{modality}"] for modality in known.names)
            given = run.step.evaluate(others, objective, objective.metrics).metrics
            values[f"modality/{name}/image_gain"] = (sum(given[f"loss/{modality}"] for modality in known.names) - total) / count
        return values


def modalities_of(run: Run) -> Modalities | None:
    """Of the run's model; None where it is another one than a vision-language model."""
    part = run.model.parts[0]
    return part.context.modalities if isinstance(part, VisionLanguageModel) else None


def token_shares(run: Run, known: Modalities) -> dict[str, float]:
    """Collective: `modality/NAME/share` of the tokens of the step's batches on all ranks."""
    counts = torch.zeros(len(known.names), dtype=torch.float64)
    for batch in run.batches:  # ranks that read the same rows are as many for each row
        place = known.of(batch.tokens)
        place = place if batch.real is None else place[batch.real]
        counts += torch.bincount(place.flatten(), minlength=len(known.names))
    total = run.topology.all_reduce(counts.to(run.topology.device)).tolist()
    return {f"modality/{name}/share": count / max(sum(total), 1) for name, count in zip(known.names, total, strict=True)}


def gate_values(run: Run) -> dict[str, float]:
    """Collective: `gate/BLOCK/PART` of every cross block; a gate is where its rank has it."""
    every: Mapping[str, object] = run.model.specs.tensors
    names = {name: f"gate/{name.removesuffix(end)}/{part}" for name in every for end, part in GATES.items() if name.endswith(end)}
    if not names:
        return {}
    places, values = {name: place for place, name in enumerate(names)}, torch.zeros(len(names), dtype=torch.float64)
    for name, tensor in run.model.tensors():
        if name in places and (piece := run.model.piece(name, tensor)).owned:
            values[places[name]] = piece.local.detach().double().tanh().sum()
    return dict(zip(names.values(), run.topology.all_reduce(values.to(run.topology.device)).tolist(), strict=True))


def _counts_its_rows(run: Run) -> bool:
    """Whether this rank speaks for the rows that it reads: of the ranks that read the same ones, one does."""
    return all(run.topology.coordinates[axis] == 0 for axis in ("tp", "pp", "cp"))


@dataclass(frozen=True)
class ModalityObjective:
    """The negative log-likelihood, and as metrics its sum over the labels of each modality (`loss/NAME`), their number
    (`tokens/NAME`), and how many have the largest logit (`correct/NAME`)."""

    modalities: Modalities

    @property
    def metrics(self) -> tuple[str, ...]:
        """Their names, the same on all ranks."""
        return tuple(f"{what}/{name}" for name in self.modalities.names for what in ("loss", "tokens", "correct"))

    def __call__(self, head: Any, hidden: Tensor, labels: Tensor) -> LossTerms:
        """`hidden` (B, T, embed), `labels` (B, T).

        Raises:
            ValueError: ranks have parts of sequences.
        """
        total, nll, _ = head.loss(hidden, labels)
        counted, correct = labels != IGNORE, predict(head, hidden) == labels
        place, found = self.modalities.of(labels), {}
        for number, name in enumerate(self.modalities.names):
            here = counted & (place == number)
            found[f"loss/{name}"] = nll.where(here, 0).sum()
            found[f"tokens/{name}"] = here.sum()
            found[f"correct/{name}"] = (correct & here).sum()
        return LossTerms(total, counted.sum(), found)


@torch.no_grad()
def predict(head: Any, hidden: Tensor) -> Tensor:
    """(B, T) int64: the id with the largest logit; logits of a few positions exist at a time."""
    rows, length, width = hidden.shape
    size = max(1, chunk_rows(head.weight.shape[0], width, hidden.element_size()) // max(1, rows))
    found = []
    for start in range(0, length, size):
        logits = head(hidden[:, start : start + size])
        if logits.shape[1] != min(size, length - start):
            raise ValueError(
                "hook 'modalities' needs whole sequences on every rank; set transforms.tensor.sequence_parallel = false, or "
                "hooks.batches = 0"
            )
        found.append(logits.argmax(-1))
    return torch.cat(found, 1)


ROW_EXTRAS = ("image_rows", "prefix")
"""Extras with one entry for each row; the others have one for each image."""


class _ImagePlace(NamedTuple):
    batch: int
    row: int
    number: int


def swap_images(batches: Sequence[Batch], varies: bool = False) -> tuple[list[Batch], int]:
    """The batches with images moved between rows, within and across batches, and how many labels the rows have whose images are
    others now.

    Images of one shape, and where it `varies` (`FusionContext`) of as many patches, move along their order by as many places as a
    row has at most, so that no row keeps one of its images. Where they are too few for that they stay.
    """
    groups: dict[tuple[int, ...], list[_ImagePlace]] = {}
    for number, batch in enumerate(batches):
        if "images" not in batch.extras:
            continue
        items = batch.extras["images"]
        sizes = split_native(items)[1].prod(1).tolist() if varies else [0] * len(items)
        for row, images in enumerate(batch.extras["image_rows"].tolist()):
            for image in (each for each in images if each >= 0):
                groups.setdefault((*items.shape[1:], sizes[image]), []).append(_ImagePlace(number, row, image))
    sources: list[dict[int, _ImagePlace]] = [{} for _ in batches]
    rows: set[tuple[int, int]] = set()
    for images in groups.values():
        most = max(Counter((one.batch, one.row) for one in images).values(), default=0)
        if len(images) < 2 * most:
            continue
        for place, one in enumerate(images):
            sources[one.batch][one.number] = images[(place + most) % len(images)]
            rows.add((one.batch, one.row))
    labels = sum(int((batches[number].labels[row] != IGNORE).sum()) for number, row in rows)
    return [_with_images_of(batch, found, batches) for batch, found in zip(batches, sources, strict=True)], labels


def _with_images_of(batch: Batch, sources: Mapping[int, _ImagePlace], batches: Sequence[Batch]) -> Batch:
    if not sources:
        return batch
    moved: dict[str, Tensor] = {}
    for name, own in batch.extras.items():
        if name not in ROW_EXTRAS:
            every = [sources.get(number) for number in range(len(own))]
            moved[name] = torch.stack(
                [own[number] if one is None else batches[one.batch].extras[name][one.number] for number, one in enumerate(every)]
            )
    return replace(batch, extras={**batch.extras, **moved})
