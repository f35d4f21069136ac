"""The typed recipe for checks and hooks.

These protocols have the keys that packages read from each other's sections. The package that owns a section has a derived
protocol with all keys. Components are open to plugins, so their type is `Any`.
"""

from collections.abc import Mapping
from typing import Any, Protocol


class Identity(Protocol):
    """`[job]`."""

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...


class Train(Protocol):
    """`[train]`; batches are counted in sequences."""

    @property
    def max_steps(self) -> int: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...


class Data(Protocol):
    """`[data]`; `sequence_length` in tokens."""

    @property
    def sequence_length(self) -> int: ...


class Precision(Protocol):
    """`[precision]`; `compute` is `bf16`, `fp32` or `fp64`."""

    @property
    def compute(self) -> str: ...


class Checkpoint(Protocol):
    """`[checkpoint]`; `every` in steps, 0 = only at the end; `first`: whether step 0 is also saved."""

    @property
    def every(self) -> int: ...
    @property
    def first(self) -> bool: ...


class Job(Protocol):
    """A recipe (`forge_train.recipe.schema.Job`)."""

    @property
    def job(self) -> Identity: ...
    @property
    def model(self) -> Any: ...
    @property
    def data(self) -> Data: ...
    @property
    def train(self) -> Train: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def transforms(self) -> Mapping[str, Any]: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def objective(self) -> Any: ...
    @property
    def checkpoint(self) -> Checkpoint: ...
