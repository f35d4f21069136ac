"""Features of a recipe, combinations of features that tests prove, and receipts of measured combinations.

A feature is declared at its option (`forge_core.features`). The following are features as well: model components and
objectives with a `feature` name, transforms, pipeline schedules, optimizers whose update of an element depends on others,
gradient accumulation, and parts of the model or objective from other packages, with the package in their name
(`forge_lionize:clip`). `rows.json` lists the combinations that tests compare with one process; `parity --record` writes receipts
of others.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from forge_core.component import Component, fields_of
from forge_core.errors import BrokenPlugin, ForgeError
from forge_core.features import Use, interact, used
from forge_core.files import replace_file
from forge_core.layout import Layout
from forge_core.protocols.run import Job
from forge_core.registry import Registry
from forge_parallel.model.plan import default_transforms
from forge_parallel.optim.optimizers import PROVEN
from forge_parallel.sections import Parallel, Precision
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel

DEFAULTS = MappingProxyType(
    {"shard": FullyShard(), "tensor": TensorParallel(), "context": ContextParallel(), "expert": ExpertParallel()}
)
"""Transforms that an axis larger than 1 implies, with default options."""

OURS = frozenset(f"forge_{name}" for name in ("core", "parallel", "models", "data", "ckpt", "vlm", "interp", "train", "lab"))
"""Packages whose parts are proven by this repository's tests."""


class ParallelJob(Job, Protocol):
    """A job whose sections `[parallel]` and `[precision]` are those of this package."""

    @property
    def parallel(self) -> Parallel: ...
    @property
    def precision(self) -> Precision: ...


def batches_of(job: ParallelJob) -> dict[str, int]:
    """Returns the sequences per step of a run and of the phases that change it, by key."""
    return {"train.global_batch": job.train.global_batch, **_of_phases(job, "global_batch")}


def lengths_of(job: ParallelJob) -> dict[str, int]:
    """Returns the tokens per sequence of a run and of the phases that change it, by key."""
    return {"data.sequence_length": job.data.sequence_length, **_of_phases(job, "sequence_length")}


def _of_phases(job: ParallelJob, name: str) -> dict[str, int]:
    phases = getattr(getattr(job, "data", None), "phases", ())
    values = {f"data.phases.{index}.{name}": getattr(phase, name) for index, phase in enumerate(phases)}
    return {key: value for key, value in values.items() if value is not None}


def features(job: ParallelJob, layout: Layout) -> list[Use]:
    """Returns the features that a job, or any object with its sections, uses in a layout; each once."""
    sizes = layout.sizes()
    uses = used(Parallel, sizes, sizes, "parallel")
    uses += _options(job.precision, "precision", sizes, Precision)
    for name, transform in job.transforms.items():
        if name not in DEFAULTS:  # those are features of their axes
            uses.append(_of(type(transform), Use(name, getattr(transform, "plane", "layout"), f"[transforms.{name}]")))
    for key, component in strategies(job, layout).items():
        uses += _options(component, key, sizes)
    if layout.pp > 1:
        schedule = job.parallel.pipeline.schedule
        name = schedule.build().name
        uses.append(_of(type(schedule), Use(f"pp_{name}", "layout", f"parallel.pipeline.schedule = {{name = '{name}'}}")))
    key, batch = max(batches_of(job).items(), key=lambda item: item[1])
    if batch > job.train.micro_batch * layout.data:
        uses.append(Use("accumulate", "layout", f"{key} larger than one micro-batch per data rank"))
    optimizer = getattr(job, "optimizer", None)
    if layout.world > 1 and getattr(optimizer, "shards", None) in PROVEN:
        name = getattr(optimizer, "feature", type(optimizer).__name__.lower())
        uses.append(_of(type(optimizer), Use(name, "optimizer", f"optimizer.name = {name!r}")))
    groups = getattr(getattr(job, "parameters", None), "groups", ())
    uses += [use for index, group in enumerate(groups) for use in _options(group, f"parameters.groups.{index}", sizes)]
    stages = getattr(job.train, "stages", ())
    uses += [use for index, stage in enumerate(stages) for use in _options(stage, f"train.stages.{index}", sizes)]
    uses += _options(job.model, "model", sizes)
    objective = getattr(job, "objective", None)
    uses += _options(objective, "objective", sizes)
    for key, part in (("model", job.model), ("objective", objective)):
        if own := getattr(part, "feature", ""):
            uses.append(_of(type(part), Use(own, "model", f"{key}.name of {type(part).__name__}")))
    uses += _named(job.model, "model", sizes)
    if layout.world > 1:
        for section in ("model", "objective"):
            uses += _brought(getattr(job, section, None), section)
    return list({use.name: use for use in uses}.values())


def strategies(job: ParallelJob, layout: Layout) -> dict[str, Any]:
    """Returns, by key, the transforms that a job names or its axes imply, and its pipeline schedule."""
    implied = {name: DEFAULTS[name] for name in default_transforms(layout, job.transforms) if name in DEFAULTS}
    options = {f"transforms.{name}": component for name, component in {**implied, **job.transforms}.items()}
    return options | ({"parallel.pipeline.schedule": job.parallel.pipeline.schedule} if layout.pp > 1 else {})


def origin(cls: type) -> str:
    """Returns the package that defines a class, or the name of its plugin file."""
    root = cls.__module__.partition(".")[0]
    if root.startswith("forge_file_"):
        return Path(getattr(sys.modules.get(root), "__file__", None) or root).name
    return root


def is_ours(name: str) -> bool:
    """Whether a feature name belongs to this repository."""
    return ":" not in name


def _of(cls: type, use: Use) -> Use:
    """Returns the use of a feature of `cls`, with the package in its name if a plugin defines the class."""
    package = origin(cls)
    if package in OURS:
        return use
    return use._replace(name=f"{package}:{use.name}", module=cls.__module__.partition(".")[0])


def _options(instance: Any, key: str, sizes: Mapping[str, int], cls: type | None = None) -> list[Use]:
    cls = cls or type(instance)
    values = {info.name: getattr(instance, info.name) for info in (fields_of(cls) if dataclasses.is_dataclass(cls) else ())}
    return [_of(cls, use) for use in used(cls, values, sizes, key)]


def _named(part: Any, key: str, sizes: Mapping[str, int]) -> Iterator[Use]:
    """Yields the uses of a model's components that are features themselves, those with a name in `feature`, and of features that
    fields of its components and sections declare."""
    for info in fields_of(type(part)) if dataclasses.is_dataclass(part) else ():
        inner = getattr(part, info.name)
        if isinstance(inner, Component) and (name := getattr(inner, "feature", "")):
            yield _of(type(inner), Use(name, "model", f"{key}.{info.name} of {type(inner).__name__}"))
        if dataclasses.is_dataclass(inner):
            yield from _options(inner, f"{key}.{info.name}", sizes)
            yield from _named(inner, f"{key}.{info.name}", sizes)


def _brought(part: Any, key: str) -> Iterator[Use]:
    """Yields the uses of components from other packages, in `part` and all components below it."""
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return
    if isinstance(part, Component) and origin(type(part)) not in OURS:
        yield _of(type(part), Use(type(part).__name__, "model", f"{key} of {origin(type(part))}"))
    for info in fields_of(type(part)):
        yield from _brought(getattr(part, info.name), f"{key}.{info.name}")


TESTS = MappingProxyType(
    {
        "fast": "tests/parallel/compositions/test_compositions.py::test_a_run_equals_one_process",
        "slow": "tests/parallel/compositions/test_compositions.py::test_the_remaining_pairs_equal_one_process",
        "large": "tests/parallel/compositions/test_compositions.py::test_three_axes_and_more_equal_one_process",
        "fusions": "tests/vlm/test_layouts.py::test_a_fusion_equals_one_process",
        "fusions_slow": "tests/vlm/test_layouts.py::test_the_remaining_fusions_equal_one_process",
        "transformers": "tests/models/hf/test_causal_lm_layouts.py::test_a_class_of_transformers_equals_one_process",
        "transformers_slow": "tests/models/hf/test_causal_lm_layouts.py::test_the_remaining_layouts_equal_one_process",
        "image_text": "tests/vlm/hf/test_image_text_layouts.py::test_an_image_text_class_equals_one_process",
        "image_text_slow": "tests/vlm/hf/test_image_text_layouts.py::test_the_remaining_layouts_equal_one_process",
    }
)
"""Kind of row -> the test that runs its rows. Fast and slow tests use at most four ranks, except for pairs that need eight."""


@cache
def proven_rows() -> MappingProxyType[str, tuple[frozenset[str], ...]]:
    """Returns {kind of row: the features of each of its runs}. Rows of the kind `gpu` prove nothing, as they run only on
    request."""
    runs_of = json.loads(Path(__file__).with_name("rows.json").read_text())
    return MappingProxyType({kind: tuple(frozenset(row.split()) for row in runs) for kind, runs in runs_of.items()})


def is_proven(features: Collection[str]) -> bool:
    """Whether a test runs all of these features together."""
    together = frozenset(features)
    return any(together <= row for kind in TESTS for row in proven_rows()[kind])


def unproven(uses: Iterable[Use], brought: Collection[frozenset[str]] = ()) -> list[tuple[Use, ...]]:
    """Returns the features, and the pairs of proven features that interact, that no test proves; sorted by name.

    Args:
        uses: the features of a job in a layout.
        brought: sets of features that receipts prove together; they count for features of plugins only.
    """

    def proven(*uses: Use) -> bool:
        names = frozenset(use.name for use in uses)
        return is_proven(names) or (any(not is_ours(name) for name in names) and any(names <= row for row in brought))

    ordered = sorted(uses, key=lambda use: use.name)
    single = [(use,) for use in ordered if not proven(use)]
    known = [use for use in ordered if (use,) not in single]
    return [*single, *(pair for pair in combinations(known, 2) if _meet(*pair) and not proven(*pair))]


def _meet(one: Use, other: Use) -> bool:
    """Whether a pair has to be proven. For a plugin's feature only pairs with layouts: other effects are the same on one
    process."""
    ours = is_ours(one.name) and is_ours(other.name)
    return interact(one.plane, other.plane) and (ours or "layout" in (one.plane, other.plane))


GROUP = "forge.proofs"
FORGE = ("forge_core", "forge_models", "forge_parallel")
"""Packages whose code determines the numbers."""


@dataclass(frozen=True)
class Receipt:
    """The record of a layout that had the numbers of one process.

    Attributes:
        features: names of all features that were used together.
        layout: as text, such as `dp2tp2`.
        mode: format of the numbers, such as `fp64`.
        tolerance: largest accepted relative error, for readers only; `within` has the limits that apply.
        errors: measured errors by name.
        digests: package or plugin file -> digest of its code.
        versions: versions of torch and Forge, for readers only.
    """

    features: tuple[str, ...]
    layout: str
    mode: str
    tolerance: float
    errors: Mapping[str, float]
    digests: Mapping[str, str]
    versions: Mapping[str, str]

    def holds(self, now: Mapping[str, str]) -> bool:
        """Whether the errors are within tolerance and the code is unchanged; `now` is what `digests` returns for a job."""
        return not self.changed(now) and within(self.errors, self.mode)

    def changed(self, now: Mapping[str, str]) -> list[str]:
        """Returns the packages whose code has changed, for which the receipt has no digest, or which the job does not use."""
        brought = {name.partition(":")[0] for name in self.features if ":" in name}
        needed = {*FORGE, *brought, *self.digests}
        return sorted(name for name in needed if name not in self.digests or now.get(name) != self.digests[name])


def write(receipt: Receipt, folder: Path) -> Path:
    """Writes a receipt; replaces one with the same features, layout and mode."""
    what = sha256(json.dumps([sorted(receipt.features), receipt.mode]).encode()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{receipt.layout}-{receipt.mode}-{what}.json"
    replace_file(file, (json.dumps(asdict(receipt), indent=2, sort_keys=True) + "\n").encode())
    return file


def read(folder: Path) -> list[Receipt]:
    """Returns the receipts in a folder.

    Raises:
        ForgeError: the folder does not exist, or a file in it is not a receipt.
    """
    if not folder.is_dir():
        raise ForgeError(f"folder {folder} of parallel.proofs does not exist; record receipts with forge-train parity --record")
    receipts = []
    for file in sorted(folder.glob("*.json")):
        try:
            values = json.loads(file.read_text())
            receipts.append(Receipt(**{**values, "features": tuple(values["features"])}))
        except (ValueError, TypeError, KeyError) as error:
            raise ForgeError(f"{file} is not a receipt of forge-train parity --record ({error}); remove it") from error
    return receipts


def offered(folders: Iterable[Path], registry: Registry) -> list[Receipt]:
    """Returns the receipts in these folders and those of installed plugins; a plugin that cannot be loaded is skipped."""
    plugin_folders = []
    for entry in registry.of(GROUP):
        with suppress(BrokenPlugin):
            plugin_folders.append(Path(registry.load_entry(entry)))
    return [receipt for folder in (*folders, *plugin_folders) for receipt in read(folder)]


def digests(uses: Iterable[Use]) -> dict[str, str]:
    """Returns {package of Forge, or plugin with one of these features: digest of its Python sources}."""
    modules = {name: {name} for name in FORGE}
    for use in uses:
        if use.module:  # two plugin files with the same name get one digest
            modules.setdefault(use.name.partition(":")[0], set()).add(use.module)
    return {name: _digest(sources) for name, sources in modules.items()}


def _digest(modules: set[str]) -> str:
    files = [file for name in sorted(modules) for file in _sources(import_module(name))]
    return sha256(b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)).hexdigest()[:16]


def _sources(module: Any) -> list[Path]:
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    single = getattr(module, "__file__", None)
    return sorted(file for folder in folders for file in folder.rglob("*.py")) or ([Path(single)] if single else [])


TOLERANCE = MappingProxyType({"fp64": 1e-10, "fp32": 2e-6, "bf16": 2**-6})
"""Largest accepted error relative to a tensor's largest element, by the dtype of the state. Gradients in bf16 are rounded by 2^-9
in every micro-batch, so the bf16 limit allows a few of these roundings; the loss has the limit of fp32."""


def within(errors: Mapping[str, float], state: str) -> bool:
    """Whether `loss`, `norm`, `gradients` and, in fp64, `weights` are within tolerance; a missing error counts as infinite."""
    limit = TOLERANCE.get(state, -1.0)
    compared = ("norm", "gradients", *(["weights"] if state == "fp64" else []))
    loss = errors.get("loss", math.inf) <= min(limit, TOLERANCE["fp32"])
    return loss and all(errors.get(name, math.inf) <= limit for name in compared)
