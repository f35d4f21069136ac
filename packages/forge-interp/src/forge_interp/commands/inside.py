"""Hook `inside`, which measures inner values during training on the same held-out rows each time, and the checks of its recipe.

Functions import torch, so that importing this module does not.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, MinLen

from forge_core.batch import Batch
from forge_core.component import FREE
from forge_core.errors import Fault, ForgeError, did_you_mean
from forge_core.files import replace_file
from forge_core.layout import Layout
from forge_core.protocols.run import Run
from forge_train.directory import INSIDE, SIMILARITY
from forge_train.hooks.periodic import Periodic

if TYPE_CHECKING:
    from torch import Tensor

    from forge_interp.commands.look import Look
    from forge_train.recipe.schema import Job

_log = logging.getLogger(__name__)
_KEPT = 4
"""Number of recent checkpoints whose looks are kept besides the first and the newest, because a run may roll back to any of
them."""


@dataclass(kw_only=True)
class Inside(Periodic):
    """Measures the model on the same held-out rows each time, and logs by layer: similarity to the initial weights and to the
    previous look (CKA), effective rank, entropy and largest score of attention, loss of the logit lens, agreement of routers
    with the previous look.

    Every layer has numbers `inside/blocks.3/NAME`. `cka_first` and `cka_previous`: unbiased linear CKA of the block's output
    stream with that of the first and of the previous look. `effective_rank`: effective rank of the stream. `attention_entropy`:
    nats, mean over heads. `max_score`: largest score of all heads before the softmax. `lens_loss`: loss of the model's head on
    the stream. `router_agreement`: share of the selected experts that were also selected at the previous look. `inside/seconds`:
    duration of the look, which does not count as training time.

    All looks use the same held-out tokens. Folder `inside/` in the run's directory has the data of earlier looks, so comparisons
    continue after a resume.
    """

    key_class: ClassVar = FREE
    leisurely = True
    observes = True
    former_keys = ("forge-train:inside",)

    every: Annotated[int, Gt(0)] = 100
    """Optimizer steps between two looks; the initial weights and the last step always have one."""
    statistics: Annotated[list[Literal["cka", "effective_rank", "attention", "lens", "routing"]], MinLen(1)] = field(
        default_factory=lambda: ["cka", "effective_rank", "attention", "lens", "routing"]
    )
    """Statistics to measure. A statistic that the layout does not support is an error."""
    held_out: str | None = None
    """Name of the held-out set; by default the first one."""
    rows: Annotated[int, Gt(0)] = 4
    """Number of rows, from the start of the set; all data ranks run them."""
    tokens: Annotated[int, Ge(8)] = 256
    """Number of evenly spaced tokens of these rows to compare. The run's directory stores tokens^2 numbers per layer."""

    def __post_init__(self) -> None:
        self.last = -1
        self.saved: list[int] = []
        self.looks, self.seconds = 0, 0.0

    def check(self, run: Run) -> None:
        """Checks that the inner values of the model have names."""
        from forge_interp.tap_names import InterpError, taps

        try:
            taps(_whole(run))
        except (InterpError, AttributeError, TypeError) as cause:
            raise ForgeError(f"hook 'inside' cannot look into model {type(run.job.model).__name__}: {cause}") from cause

    def state(self) -> Mapping[str, Any]:
        """Returns the step of the newest look. Its data are kept while a checkpoint may resume from it."""
        if self.last >= 0 and self.last not in self.saved:
            self.saved = [*self.saved, self.last][-_KEPT:]
        return {**super().state(), **({"last": self.last} if self.last >= 0 else {})}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        super().load_state(state)
        self.last = state.get("last", -1)
        self.saved = [self.last] if self.last >= 0 else []

    def start(self, run: Run) -> None:
        """Measures the initial weights."""
        super().start(run)
        if run.state.step == 0:
            self.once(run)

    def finish(self, run: Run) -> None:
        """Measures the last weights, and logs the duration of all looks."""
        super().finish(run)
        if run.topology.rank == 0 and self.looks:
            _log.info("hook 'inside' took %.2f s for %d looks", self.seconds, self.looks)

    def act(self, run: Run) -> None:
        """Collective: evaluates the rows and gathers the values to compare."""
        from forge_interp.commands.look import look

        began = perf_counter()
        batch = self._batch(run)
        length = batch.tokens.shape[1]
        count = min(length, max(1, -(-self.tokens // len(batch.tokens))))
        places = [(at + 1) * length // count - 1 for at in range(count)]
        found = look(run.model, _whole(run), run.step, batch, self.statistics, places)
        attention = self._attention(run, found)
        if run.topology.rank == 0:
            values = self._values(run, found, attention, self._kind(batch, places))
            self.looks, taken = self.looks + 1, perf_counter() - began
            self.seconds += taken
            run.log({**{f"inside/{name}": value for name, value in values.items() if isfinite(value)}, "inside/seconds": taken})
            if run.console is not None and self.looks == 1:
                where = f"{len(batch.tokens)} rows, {len(batch.tokens) * count} tokens compared"
                run.console.print(f"inside: {taken:.2f} s a look every {self.every} steps ({where})", highlight=False)
        self.last = run.state.step

    def _batch(self, run: Run) -> Batch:
        name = self.held_out if self.held_out is not None else next(iter(run.evaluations))
        return next(iter(run.evaluations[name].batches(0, 1, self.rows)))

    def _attention(self, run: Run, found: "Look") -> dict[str, tuple[float, float, float]]:
        from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld

        world = ProcessGroupWorld(device=run.topology.device) if run.topology.size > 1 else SingleProcessWorld()
        merged: dict[str, tuple[float, float, float]] = {}
        for payload in world.all_gather(json.dumps(found.attention).encode()):
            for block, (total, number, largest) in json.loads(payload).items():
                before = merged.get(block, (0.0, 0.0, float("-inf")))
                merged[block] = (before[0] + total, before[1] + number, max(before[2], largest))
        return merged

    def _values(
        self, run: Run, found: "Look", attention: Mapping[str, tuple[float, float, float]], kind: str
    ) -> dict[str, float]:
        """Returns the statistics by `blocks.N/NAME`; writes the data that later looks compare with."""
        from forge_interp.similarity import gram, gram_cka, gram_rank

        folder = run.directory / INSIDE
        products = {block: gram(stream) for block, stream in found.streams.items()}
        kept = {f"gram/{block}": one.float().cpu() for block, one in products.items() if "cka" in self.statistics}
        kept |= {f"experts/{block}": one.cpu() for block, one in found.experts.items()}
        first, previous = (_read(path, kind) for path in (folder / "first.safetensors", _file(folder, self.last)))
        values: dict[str, float] = {}
        for block in dict.fromkeys((*products, *found.experts, *found.lens, *attention)):
            for name, other in (("cka_first", first), ("cka_previous", previous)):
                if (key := f"gram/{block}") in other and key in kept:
                    values[f"{block}/{name}"] = float(gram_cka(kept[key], other[key]))
            if (key := f"experts/{block}") in previous and key in kept:
                values[f"{block}/router_agreement"] = agreement(kept[key], previous[key])
            if "effective_rank" in self.statistics and block in products:
                values[f"{block}/effective_rank"] = float(gram_rank(products[block]))
            if block in attention:
                total, number, values[f"{block}/max_score"] = attention[block]
                values[f"{block}/attention_entropy"] = total / number
            if block in found.lens:
                values[f"{block}/lens_loss"] = found.lens[block]
        if kept:
            self._keep(folder, kept, kind, run.state.step)
        if maps := similarity_maps(_grams(kept), _grams(first)):
            self._draw(run.directory / SIMILARITY, {"step": run.state.step, "maps": maps})
        return values

    def _draw(self, path: Path, found: Mapping[str, Any]) -> None:
        try:
            replace_file(path, json.dumps(found).encode())
        except OSError as cause:  # a full disk must not end the run
            _log.warning("hook 'inside' could not write %s: %s", path.name, cause)

    def _keep(self, folder: Path, kept: "dict[str, Tensor]", kind: str, step: int) -> None:
        from safetensors.torch import save

        content = save(kept, {"kind": kind})
        try:
            folder.mkdir(exist_ok=True)
            if step == 0:
                replace_file(folder / "first.safetensors", content)
            replace_file(_file(folder, step), content)
            spared = {_file(folder, one) for one in (step, *self.saved)}
            for path in folder.glob("step-*.safetensors"):
                if path not in spared:
                    path.unlink()
        except OSError as cause:  # a full disk must not end the run
            _log.warning("hook 'inside' could not keep its look at step %d: %s", step, cause)

    def _kind(self, batch: Batch, places: Sequence[int]) -> str:
        """Returns a digest that is equal for looks at the same tokens."""
        digest = hashlib.sha256(batch.tokens.cpu().contiguous().numpy().tobytes())
        return hashlib.sha256(digest.digest() + json.dumps(list(places)).encode()).hexdigest()


def inside_can_be_measured(job: "Job", layout: Layout | None) -> Iterator[Fault]:
    """Checks that hook `inside` has held-out rows, and that the layout supports its statistics."""
    for index, hook in enumerate(job.hooks):
        if not isinstance(hook, Inside):
            continue
        sets = job.data.evaluation
        if not sets:
            hint = 'add a held-out set, such as [data.evaluation.held_out] name = "stdlib" split = "held_out"'
            yield Fault(f"hooks.{index}.name", "'inside' needs a held-out set", hint=hint)
        elif hook.held_out is not None and hook.held_out not in sets:
            yield Fault(
                f"hooks.{index}.held_out",
                f"{hook.held_out!r} is not a held-out set",
                hint=did_you_mean(hook.held_out, list(sets)),
            )
        cut = {} if layout is None else {"attention": ("cp", layout.cp), "lens": ("pp", layout.pp)}
        why = {"attention": "has each row's keys on several ranks", "lens": "has the head on its last stage only"}
        if "lens" in hook.statistics and getattr(getattr(job.model, "shape", None), "streams", None) is not None:
            yield Fault(
                f"hooks.{index}.statistics",
                "'lens' reads one residual stream, but model.streams gives the model several",
                hint="leave out 'lens'",
            )
        for name, (axis, size) in cut.items():
            if name in hook.statistics and size > 1:
                yield Fault(
                    f"hooks.{index}.statistics",
                    f"{name!r} cannot be measured: parallel.{axis} = {size} {why[name]}",
                    hint=f"leave out {name!r}, or set parallel.{axis} = 1",
                )


def similarity_maps(now: "Mapping[str, Tensor]", first: "Mapping[str, Tensor]") -> list[dict[str, Any]]:
    """Returns heat maps of the CKA of all pairs of layers of a look, and of its layers with those of the first look, from the
    Gram matrices by block; empty for fewer than two layers."""
    from forge_interp.similarity import gram_cka_pairs

    if len(now) < 2:
        return []
    maps = []
    for title, other in (("Likeness of layers", now), ("Likeness of layers, below those of the first weights", first)):
        if not other:
            continue
        values = gram_cka_pairs(list(now.values()), list(other.values())).tolist()
        lines = [[round(value, 4) if isfinite(value) else None for value in line] for line in values]
        maps.append({"title": title, "rows": list(now), "columns": list(other), "values": lines})
    return maps


def _grams(kept: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    return {name.removeprefix("gram/"): one for name, one in kept.items() if name.startswith("gram/")}


def agreement(experts: "Tensor", before: "Tensor") -> float:
    """Returns the mean share of a token's experts (tokens, top_k) that were also selected before."""
    return float((experts[:, :, None] == before[:, None, :]).any(2).double().mean())


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.safetensors"


def _read(path: Path, kind: str) -> "dict[str, Tensor]":
    """Reads the data of a look; empty if the file is missing or is about other tokens."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("kind") == kind:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError):
        pass
    return {}


def _whole(run: Run) -> Any:
    import torch

    with torch.device("meta"):
        return run.job.model.build()
