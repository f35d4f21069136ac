"""Hooks that ask the model: held-out sets, tasks, questions and prompts; chosen in `[[hooks]]`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, MinLen

from forge_core.component import FREE, Component

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forge_core.protocols.run import Hook


@dataclass(frozen=True, kw_only=True)
class Evaluate(Component):
    """Loss and perplexity on every set of `[data.evaluation]`, weighted by tokens over all ranks."""

    key_class: ClassVar = FREE

    every: Annotated[int, Gt(0)] = 500
    """Optimizer steps between two evaluations; the last step of the run is always evaluated."""
    at_start: bool = False
    """Also evaluate the initial weights, before the first step."""
    weights: Literal["model", "ema"] = "model"
    """Whose weights: the model's, or their average, which hook `ema` keeps. Results of the average have `@ema` in their names."""

    def build(self) -> "Hook":
        from forge_train.hooks.evaluation import EvaluateHook

        return EvaluateHook(every=self.every, at_start=self.at_start, weights=self.weights)


@dataclass(frozen=True, kw_only=True)
class Tasks(Component):
    """Tasks of the LM Evaluation Harness, on the weights as they are; needs `pip install "forge-train[eval]"`. The metrics of a
    task are logged as `tasks/NAME/METRIC`."""

    key_class: ClassVar = FREE

    tasks: Annotated[list[str], MinLen(1)]
    """Their names, or those of groups of tasks."""
    every: Annotated[int, Gt(0)] = 1000
    """Optimizer steps between two times; after the last step they are always asked."""
    folder: str | None = None
    """Folder with task files of your own."""
    shots: Annotated[int, Ge(0)] | None = None
    """Examples before each question; what the task says when absent."""
    limit: Annotated[int, Gt(0)] | None = None
    """Questions of each task at most; all when absent."""
    batch: Annotated[int, Gt(0)] = 8
    """Texts in one forward of a rank."""
    weights: Literal["model", "ema"] = "model"
    """Whose weights: the model's, or their average, which hook `ema` keeps; then `NAME@ema` takes the place of NAME."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Tasks]":
        """A task of one question."""
        question = folder / "question.jsonl"
        question.write_text('{"text": "a", "answer": 1}\n')
        (folder / "task.yaml").write_text(
            f"task: forge_example\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {question}}}}}\ntest_split: test\n"
            "output_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: [b, c]\ndoc_to_target: '{{answer}}'\n"
            "metric_list: [{metric: acc}]\n"
        )
        return (cls(tasks=["forge_example"], folder=str(folder), every=2),)

    def build(self) -> "Hook":
        from forge_train.hooks.evaluation import TasksHook

        return TasksHook(
            tasks=self.tasks,
            every=self.every,
            folder=self.folder,
            shots=self.shots,
            limit=self.limit,
            batch=self.batch,
            weights=self.weights,
        )


@dataclass(frozen=True, kw_only=True)
class Best(Component):
    """Saves where an evaluation is better than all before; retention spares that checkpoint, and the file `best` names it."""

    key_class: ClassVar = FREE

    metric: str = "evaluation/held_out/loss"
    """The result that counts, by the name under which it is logged."""
    mode: Literal["min", "max"] = "min"
    """Whether less or more is better."""

    def build(self) -> "Hook":
        from forge_train.hooks.evaluation import BestHook

        return BestHook(metric=self.metric, mode=self.mode)


@dataclass(frozen=True, kw_only=True)
class EarlyStop(Component):
    """Ends the run when evaluations no longer get better, with a checkpoint and exit code 0."""

    key_class: ClassVar = FREE

    metric: str = "evaluation/held_out/loss"
    """The result that counts, by the name under which it is logged."""
    mode: Literal["min", "max"] = "min"
    """Whether less or more is better."""
    patience: Annotated[int, Gt(0)] = 3
    """Evaluations in a row that may be no better than the best one; the last of them ends the run."""
    min_delta: Annotated[float, Ge(0)] = 0.0
    """By how much a result has to be better than the best one to count as better."""

    def build(self) -> "Hook":
        from forge_train.hooks.evaluation import EarlyStopHook

        return EarlyStopHook(metric=self.metric, mode=self.mode, patience=self.patience, min_delta=self.min_delta)


@dataclass(frozen=True, kw_only=True)
class Answers(Component):
    """Has the model answer held-out documents, such as to describe images, and logs the share that is exactly right: at the end
    of the run, and every N steps if asked. Of a document what stands before its first learned token is given."""

    key_class: ClassVar = FREE

    sets: tuple[str, ...] = ()
    """Held-out sets; by default all whose documents have a part that is given."""
    count: Annotated[int, Gt(0)] = 64
    """Documents of each set that are asked, at equal distances; fewer where the set has fewer."""
    shown: Annotated[int, Ge(0)] = 16
    """Answers of each set that are kept for the report with their pictures, wrong ones first."""
    every: Annotated[int, Ge(0)] = 0
    """Optimizer steps between answers; 0 answers at the end only."""
    max_tokens: Annotated[int, Gt(0)] = 256
    """Tokens of an answer at most."""
    weights: Literal["model", "ema"] = "model"
    """Whose weights: the model's, or their average, which hook `ema` keeps."""

    def build(self) -> "Hook":
        from forge_train.hooks.samples import AnswersHook

        return AnswersHook(self.sets, self.count, self.shown, self.every, self.max_tokens, self.weights)


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
    weights: Literal["model", "ema"] = "model"
    """Whose weights: the model's, or their average, which hook `ema` keeps."""

    def build(self) -> "Hook":
        from forge_train.hooks.samples import SampleHook

        return SampleHook(
            prompts=self.prompts,
            every=self.every,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            weights=self.weights,
        )
