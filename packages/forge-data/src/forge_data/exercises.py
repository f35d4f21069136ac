"""The component of generated exercises. Importing it loads neither torch nor numpy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge

from forge_core.component import DATA
from forge_core.protocols.data import SourceComponent
from forge_data.components import Conversations, Fraction, Split

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forge_core.protocols.data import Source, SourceContext


@dataclass(frozen=True, kw_only=True)
class Exercises(SourceComponent):
    """Generated exercises with words of random letters, such as "Reverse plum: " with the solution "mulp"; no two are equal.

    Only the solution is trained. With `pairs`, an exercise is a preference pair of its solution and a wrong one.
    """

    key_class: ClassVar = DATA
    keeps_documents: ClassVar[bool] = True
    """True: `data.packing = "concatenate"`, which cuts documents, is not allowed."""

    pairs: bool = False
    """Makes preference pairs, for an objective that compares answers."""
    count: Annotated[int, Ge(2)] = 20_000
    """Number of exercises in all splits."""
    letters: Annotated[int, Ge(3)] = 4
    """Maximum number of letters of a word; more make exercises harder."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the exercises."""
    split: Split = "train"
    """Exercises are assigned to `train` or `held_out` by a hash of their number."""
    held_out: Fraction = 0.02
    """Fraction of exercises in the split `held_out`."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Exercises]":
        """A few exercises."""
        return (cls(count=60),)

    def build(self, context: "SourceContext") -> "Source":
        from forge_data.sources.exercises import write_exercises

        path = write_exercises(context.workspace / "exercises", self.pairs, self.count, self.letters, self.seed)
        form: Literal["preference", "prompt_completion"] = "preference" if self.pairs else "prompt_completion"
        return Conversations(path=path, format=form, split=self.split, held_out=self.held_out).build(context)
