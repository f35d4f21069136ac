"""The hook that lets a model speak."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le

from forge_core.component import FREE, Component

if TYPE_CHECKING:
    from forge_core.protocols.run import Hook


@dataclass(frozen=True, kw_only=True)
class Sample(Component):
    """Generates text from prompts: at the end of the run, and every N steps if asked; shown and kept for the report."""

    key_class: ClassVar = FREE

    prompts: list[str] = field(default_factory=lambda: ["The "])
    """Texts to continue."""
    every: Annotated[int, Ge(0)] = 0
    """Optimizer steps between samples; 0 samples at the end only."""
    max_tokens: Annotated[int, Gt(0)] = 96
    """Tokens to generate for each prompt."""
    temperature: Annotated[float, Ge(0)] = 0.8
    """Divides the logits before sampling; 0 takes the most likely token."""
    top_k: Annotated[int, Gt(0)] | None = None
    """Samples among the k most likely tokens."""
    top_p: Annotated[float, Gt(0), Le(1)] = 0.95
    """Samples among the most likely tokens that together have this probability."""
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    """Leaves out tokens below this fraction of the most likely one's probability."""
    repetition_penalty: Annotated[float, Gt(0)] = 1.0
    """Above 1, tokens that already occurred become less likely."""

    def build(self, run: Any) -> "Hook":
        from forge_train.hooks.sample import SampleHook

        return SampleHook(self, run)
