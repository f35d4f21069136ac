"""Hook `modalities`: loss, accuracy and share of each modality, the gates of cross blocks, and the gain from images.

The gain is the loss with the images of other rows minus the loss with the right ones. Functions import torch, so that importing
this module does not.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from annotated_types import Ge, Gt

from forge_core.batch import IGNORE, Batch
from forge_core.component import FREE
from forge_core.protocols.data import EvaluationSet
from forge_core.protocols.model import LossTerms
from forge_core.protocols.run import Hook, Run, StepResult
from forge_vlm.context import Modalities

if TYPE_CHECKING:
    from torch import Tensor

GATES = {".cross.attention_gate": "attention", ".cross.mlp_gate": "mlp"}
"""Suffixes of gate names -> the part of the block that the gate scales."""
ROW_EXTRAS = ("image_rows", "prefix")
"""Extras of a batch with one entry per row; the others have one entry per image."""


@dataclass(kw_only=True)
class ModalityStatistics(Hook):
    """Measures each modality of a vision-language model: loss and accuracy on held-out sets, what images are worth there, the
    share of the training tokens, and the gates of cross blocks. Hook `routing` logs the load of experts by modality.

    The numbers are over all ranks:

    - `modality/NAME/share`: share of the training tokens of the step, without padding.
    - `modality/SET/NAME/loss` and `.../accuracy`: on a held-out set, over the labels of this modality; nats per token, and the
      fraction of labels that have the largest logit.
    - `modality/SET/image_gain`, for a set with images: the loss with the images of other rows minus the loss with the right ones,
      in nats per token of the rows whose images were swapped.
    - `gate/blocks.N/attention` and `.../mlp`: tanh of the gates of a cross block.

    Images are swapped between rows of one rank, so the pairs depend on the number of data ranks. A model that is not a
    vision-language model is not measured.
    """

    key_class: ClassVar = FREE
    observes = True

    every: Annotated[int, Gt(0)] = 500
    """Steps between two measurements; the last step is measured too."""
    batches: Annotated[int, Ge(0)] = 8
    """Micro-batches of each set of `[data.evaluation]` that a rank evaluates, twice where they have images; 0 = none."""

    def __post_init__(self) -> None:
        self.acted = -1

    def after_step(self, run: Run, result: StepResult) -> None:
        """Measures every N steps."""
        if run.state.step % self.every == 0:
            self._once(run)

    def finish(self, run: Run) -> None:
        """Measures the last weights, unless the last step was measured."""
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
        run.results.update({name: (run.state.step, value) for name, value in values.items()})
        run.log(values)
        run.clock.paused += perf_counter() - started

    def _evaluated(self, run: Run, known: Modalities, name: str, held_out: EvaluationSet) -> dict[str, float]:
        """Collective: returns the metrics of one held-out set."""
        import torch

        topology, objective = run.topology, ModalityObjective(known)
        every = held_out.batches(topology.data_rank, topology.data_size, run.job.train.micro_batch)
        batches = list(islice(every, self.batches))
        evaluation = run.step.evaluate(batches, objective, objective.metrics)
        values: dict[str, float] = {}
        for modality in known.names:
            if count := evaluation.metrics[f"tokens/{modality}"]:
                values[f"modality/{name}/{modality}/loss"] = evaluation.metrics[f"loss/{modality}"] / count
                values[f"modality/{name}/{modality}/accuracy"] = evaluation.metrics[f"correct/{modality}"] / count
        swapped_batches, labels_here = swap_images(batches, run.model.parts[0].context.varies)
        labels = torch.full((), float(labels_here if _counts_its_rows(run) else 0), dtype=torch.float64, device=topology.device)
        if count := float(topology.all_reduce(labels)):
            total = sum(evaluation.metrics[f"loss/{modality}"] for modality in known.names)
            swapped = run.step.evaluate(swapped_batches, objective, objective.metrics).metrics
            values[f"modality/{name}/image_gain"] = (sum(swapped[f"loss/{modality}"] for modality in known.names) - total) / count
        return values


def modalities_of(run: Run) -> Modalities | None:
    """Returns the modalities of the run's model, or None if it is not a vision-language model."""
    from forge_vlm.model import VisionLanguageModel

    part = run.model.parts[0]
    return part.context.modalities if isinstance(part, VisionLanguageModel) else None


def token_shares(run: Run, known: Modalities) -> dict[str, float]:
    """Collective: returns `modality/NAME/share` of the tokens of the step's batches on all ranks."""
    import torch

    counts = torch.zeros(len(known.names), dtype=torch.float64)
    for batch in run.batches:  # every row is read by the same number of ranks
        place = known.of(batch.tokens)
        place = place if batch.real is None else place[batch.real]
        counts += torch.bincount(place.flatten(), minlength=len(known.names))
    total = run.topology.all_reduce(counts.to(run.topology.device)).tolist()
    return {f"modality/{name}/share": count / max(sum(total), 1) for name, count in zip(known.names, total, strict=True)}


def gate_values(run: Run) -> dict[str, float]:
    """Collective: returns `gate/BLOCK/PART` of every cross block; each gate comes from the rank that owns it."""
    import torch

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
    """Whether this rank counts its rows: True on the first of the ranks that read the same rows."""
    return all(run.topology.coordinates[axis] == 0 for axis in ("tp", "pp", "cp"))


@dataclass(frozen=True)
class ModalityObjective:
    """The negative log-likelihood as an objective for evaluations. For each modality its metrics are the sum over the labels
    (`loss/NAME`), their number (`tokens/NAME`), and how many of them have the largest logit (`correct/NAME`)."""

    modalities: Modalities

    @property
    def metrics(self) -> tuple[str, ...]:
        """Returns the names of the metrics, the same on all ranks."""
        return tuple(f"{what}/{name}" for name in self.modalities.names for what in ("loss", "tokens", "correct"))

    def __call__(self, head: Any, hidden: "Tensor", labels: "Tensor") -> LossTerms:
        """Computes the loss and the metrics of `hidden` (B, T, embed) and `labels` (B, T).

        Raises:
            ValueError: a rank has only a part of each sequence.
        """
        total, nll, _ = head.loss(hidden, labels)
        counted, correct = labels != IGNORE, predict(head, hidden) == labels
        place, metrics = self.modalities.of(labels), {}
        for number, name in enumerate(self.modalities.names):
            here = counted & (place == number)
            metrics[f"loss/{name}"] = nll.where(here, 0).sum()
            metrics[f"tokens/{name}"] = here.sum()
            metrics[f"correct/{name}"] = (correct & here).sum()
        return LossTerms(total, counted.sum(), metrics)


def predict(head: Any, hidden: "Tensor") -> "Tensor":
    """Returns (B, T) int64: the id with the largest logit. Logits are computed for a few positions at a time."""
    import torch

    from forge_models.blocks.head import chunk_rows

    rows, length, width = hidden.shape
    size = max(1, chunk_rows(head.weight.shape[0], width, hidden.element_size()) // max(1, rows))
    predictions = []
    for start in range(0, length, size):
        with torch.no_grad():
            logits = head(hidden[:, start : start + size])
        if logits.shape[1] != min(size, length - start):
            raise ValueError(
                "hook 'modalities' needs whole sequences on every rank; set transforms.tensor.sequence_parallel = false, or "
                "hooks.batches = 0"
            )
        predictions.append(logits.argmax(-1))
    return torch.cat(predictions, 1)


class _ImagePlace(NamedTuple):
    batch: int
    row: int
    number: int


def swap_images(batches: Sequence[Batch], varies: bool = False) -> tuple[list[Batch], int]:
    """Returns the batches with images moved between rows, within and across batches, and the number of labels in rows whose
    images moved.

    Images move within groups of the same shape, and of the same number of patches if that number varies (`varies` of
    `FusionContext`). In a group each image moves by the maximum number of images of a row in the group, so no row keeps one of
    its own. A group that is too small for that stays unchanged.
    """
    from forge_vlm.images.pixels import split_native

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
    return [_with_images_of(batch, images, batches) for batch, images in zip(batches, sources, strict=True)], labels


def _with_images_of(batch: Batch, sources: Mapping[int, _ImagePlace], batches: Sequence[Batch]) -> Batch:
    """Returns the batch with its images replaced; `sources` has the source of the new image by image number."""
    import torch

    if not sources:
        return batch
    moved: dict[str, Tensor] = {}
    for name, own in batch.extras.items():
        if name not in ROW_EXTRAS:
            places = [sources.get(number) for number in range(len(own))]
            moved[name] = torch.stack(
                [
                    own[number] if place is None else batches[place.batch].extras[name][place.number]
                    for number, place in enumerate(places)
                ]
            )
    return replace(batch, extras={**batch.extras, **moved})
