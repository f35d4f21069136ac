"""Measures what each modality has of a run."""

from collections.abc import Mapping
from itertools import islice
from time import perf_counter

import torch

from forge_core.protocols.data import EvaluationSet
from forge_core.protocols.run import Hook, Run, StepResult
from forge_vlm.hooks.by_modality import ModalityObjective
from forge_vlm.hooks.swapped import swapped
from forge_vlm.modality import Modalities
from forge_vlm.model import VisionLanguageModel

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
        values = shares(run, known) | gates(run)
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
        others, mine = swapped(batches, run.model.parts[0].context.varies)
        labels = torch.full((), float(mine if _reads(run) else 0), dtype=torch.float64, device=topology.device)
        if count := float(topology.all_reduce(labels)):
            total = sum(found.metrics[f"loss/{modality}"] for modality in known.names)
            given = run.step.evaluate(others, objective, objective.metrics).metrics
            values[f"modality/{name}/image_gain"] = (sum(given[f"loss/{modality}"] for modality in known.names) - total) / count
        return values


def modalities_of(run: Run) -> Modalities | None:
    """Of the run's model; None where it is another one than a vision-language model."""
    part = run.model.parts[0]
    return part.context.modalities if isinstance(part, VisionLanguageModel) else None


def shares(run: Run, known: Modalities) -> dict[str, float]:
    """Collective: `modality/NAME/share` of the tokens of the step's batches on all ranks."""
    counts = torch.zeros(len(known.names), dtype=torch.float64)
    for batch in run.batches:  # ranks that read the same rows are as many for each row
        place = known.of(batch.tokens)
        place = place if batch.real is None else place[batch.real]
        counts += torch.bincount(place.flatten(), minlength=len(known.names))
    total = run.topology.all_reduce(counts.to(run.topology.device)).tolist()
    return {f"modality/{name}/share": count / max(sum(total), 1) for name, count in zip(known.names, total, strict=True)}


def gates(run: Run) -> dict[str, float]:
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


def _reads(run: Run) -> bool:
    """Whether this rank speaks for the rows that it reads: of the ranks that read the same ones, one does."""
    return all(run.topology.coordinates[axis] == 0 for axis in ("tp", "pp", "cp"))
