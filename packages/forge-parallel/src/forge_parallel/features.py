"""Which features a job uses in a layout: what `forge_parallel.verify.proven` then has to know together.

A feature is declared where its option is (`forge_core.features`). Besides options, these are features: each component of
the model that names one (`feature`), each transform, each pipeline schedule, each optimizer whose update of an element depends on
others, gradient accumulation, and each part of the model or the objective that another package brings. What another package
brings is named after it (`forge_lionize:clip`), so it can never pass for something of ours.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from forge_core.component import Component, fields_of
from forge_core.features import Use, used
from forge_core.layout import Layout
from forge_core.protocols.job import Job
from forge_parallel.build.plan import default_transforms
from forge_parallel.components.sections import Parallel, Precision
from forge_parallel.context.transform import ContextParallel
from forge_parallel.experts.transform import ExpertParallel
from forge_parallel.optim.shards import PROVEN
from forge_parallel.tensor.transform import TensorParallel
from forge_parallel.transforms.shard import FullyShard

DEFAULTS = MappingProxyType(
    {"shard": FullyShard(), "tensor": TensorParallel(), "context": ContextParallel(), "expert": ExpertParallel()}
)
"""What an axis larger than 1 pulls in when the recipe names nothing."""

OURS = frozenset(f"forge_{name}" for name in ("core", "parallel", "models", "data", "ckpt", "vlm", "train"))
"""Packages whose parts are proven by the tests of this repository."""


class ParallelJob(Job, Protocol):
    """A recipe whose `[parallel]` and `[precision]` are this package's."""

    @property
    def parallel(self) -> Parallel: ...
    @property
    def precision(self) -> Precision: ...


def features(job: ParallelJob, layout: Layout) -> list[Use]:
    """What a job, or any object with its sections, uses in a layout; each feature once."""
    sizes = layout.sizes()
    found = used(Parallel, sizes, sizes, "parallel")
    found += _options(job.precision, "precision", sizes, Precision)
    for name, transform in job.transforms.items():
        if name not in DEFAULTS:  # those are features of their axes
            found.append(_of(type(transform), Use(name, getattr(transform, "plane", "layout"), f"[transforms.{name}]")))
    for key, component in strategies(job, layout).items():
        found += _options(component, key, sizes)
    if layout.pp > 1:
        schedule = job.parallel.pipeline.schedule
        name = schedule.build().name
        found.append(_of(type(schedule), Use(f"pp_{name}", "layout", f"parallel.pipeline.schedule = {{name = '{name}'}}")))
    if job.train.global_batch > job.train.micro_batch * layout.data:
        found.append(Use("accumulate", "layout", "train.global_batch larger than one micro-batch per data rank"))
    optimizer = getattr(job, "optimizer", None)
    if layout.world > 1 and getattr(optimizer, "shards", None) in PROVEN:
        name = type(optimizer).__name__.lower()
        found.append(_of(type(optimizer), Use(name, "optimizer", f"optimizer.name = {name!r}")))
    groups = getattr(getattr(job, "parameters", None), "groups", ())
    found += [use for index, group in enumerate(groups) for use in _options(group, f"parameters.groups.{index}", sizes)]
    stages = getattr(job.train, "stages", ())
    found += [use for index, stage in enumerate(stages) for use in _options(stage, f"train.stages.{index}", sizes)]
    found += _options(job.model, "model", sizes)
    found += _options(getattr(job, "objective", None), "objective", sizes)
    found += _named(job.model, "model")
    if layout.world > 1:
        for section in ("model", "objective"):
            found += _brought(getattr(job, section, None), section)
    return list({use.name: use for use in found}.values())


def strategies(job: ParallelJob, layout: Layout) -> dict[str, Any]:
    """By key: the transforms that a job switches on or its axes pull in, and its pipeline's schedule."""
    pulled = {name: DEFAULTS[name] for name in default_transforms(layout, job.transforms) if name in DEFAULTS}
    options = {f"transforms.{name}": component for name, component in {**pulled, **job.transforms}.items()}
    return options | ({"parallel.pipeline.schedule": job.parallel.pipeline.schedule} if layout.pp > 1 else {})


def origin(cls: type) -> str:
    """The package that defines a class; of a plugin file its name."""
    root = cls.__module__.partition(".")[0]
    if root.startswith("forge_file_"):
        return Path(getattr(sys.modules.get(root), "__file__", None) or root).name
    return root


def is_ours(name: str) -> bool:
    """Whether a feature is one of this repository's, by its name."""
    return ":" not in name


def _of(cls: type, use: Use) -> Use:
    """What a class brings, named after its package where that is a plugin's."""
    package = origin(cls)
    if package in OURS:
        return use
    return use._replace(name=f"{package}:{use.name}", module=cls.__module__.partition(".")[0])


def _options(instance: Any, key: str, sizes: Mapping[str, int], cls: type | None = None) -> list[Use]:
    cls = cls or type(instance)
    values = {info.name: getattr(instance, info.name) for info in (fields_of(cls) if dataclasses.is_dataclass(cls) else ())}
    return [_of(cls, use) for use in used(cls, values, sizes, key)]


def _named(part: Any, key: str) -> Iterator[Use]:
    """Components of a model that are features themselves: those with a `feature`, its name."""
    for info in fields_of(type(part)) if dataclasses.is_dataclass(part) else ():
        inner = getattr(part, info.name)
        if isinstance(inner, Component) and (name := getattr(inner, "feature", "")):
            yield _of(type(inner), Use(name, "model", f"{key}.{info.name} of {type(inner).__name__}"))
        if isinstance(inner, Component):
            yield from _named(inner, f"{key}.{info.name}")


def _brought(part: Any, key: str) -> Iterator[Use]:
    """Parts of other packages, in a component and all below it."""
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return
    if isinstance(part, Component) and origin(type(part)) not in OURS:
        yield _of(type(part), Use(type(part).__name__, "model", f"{key} of {origin(type(part))}"))
    for info in fields_of(type(part)):
        yield from _brought(getattr(part, info.name), f"{key}.{info.name}")
