"""Hooks of `[[hooks]]` that evaluate the model: on held-out sets, tasks, questions and prompts."""

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
    """Optimizer steps between evaluations; the last step of the run is always evaluated."""
    at_start: bool = False
    """Also evaluate the initial weights, before the first step."""
    weights: Literal["model", "ema"] = "model"
    """Weights to evaluate: the model's, or their average of hook `ema`, whose results have `@ema` in their names."""

    def build(self) -> "Hook":
        from forge_train.hooks.evaluation import EvaluateHook

        return EvaluateHook(every=self.every, at_start=self.at_start, weights=self.weights)


@dataclass(frozen=True, kw_only=True)
class Tasks(Component):
    """Runs tasks of the LM Evaluation Harness on the current weights; needs `pip install "forge-train[eval]"`. Metrics of a task
    are logged as `tasks/NAME/METRIC`."""

    key_class: ClassVar = FREE

    tasks: Annotated[list[str], MinLen(1)]
    """Names of tasks, or of groups of tasks."""
    every: Annotated[int, Gt(0)] = 1000
    """Optimizer steps between evaluations on the tasks; the last step of the run is always evaluated."""
    folder: str | None = None
    """Folder with your own task files."""
    shots: Annotated[int, Ge(0)] | None = None
    """Examples before each question; by default as the task says."""
    limit: Annotated[int, Gt(0)] | None = None
    """Maximum number of questions per task; by default all."""
    batch: Annotated[int, Gt(0)] = 8
    """Texts per forward and rank."""
    weights: Literal["model", "ema"] = "model"
    """Weights to evaluate: the model's, or their average of hook `ema`, for which NAME becomes `NAME@ema`."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Tasks]":
        """Returns a task with one question."""
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
    """Saves a checkpoint at each new best evaluation, writes its name to the file `best`, and protects it from retention."""

    key_class: ClassVar = FREE

    metric: str = "evaluation/held_out/loss"
    """Metric to compare, by its name in logs."""
    mode: Literal["min", "max"] = "min"
    """`min` if smaller is better, `max` if larger is better."""

    def build(self) -> "Hook":
        from forge_train.hooks.evaluation import BestHook

        return BestHook(metric=self.metric, mode=self.mode)


@dataclass(frozen=True, kw_only=True)
class EarlyStop(Component):
    """Ends the run when evaluations no longer improve, with a checkpoint and exit code 0."""

    key_class: ClassVar = FREE

    metric: str = "evaluation/held_out/loss"
    """Metric to compare, by its name in logs."""
    mode: Literal["min", "max"] = "min"
    """`min` if smaller is better, `max` if larger is better."""
    patience: Annotated[int, Gt(0)] = 3
    """Number of consecutive evaluations without improvement after which the run ends."""
    min_delta: Annotated[float, Ge(0)] = 0.0
    """Minimum change over the best result that counts as an improvement."""

    def build(self) -> "Hook":
        from forge_train.hooks.evaluation import EarlyStopHook

        return EarlyStopHook(metric=self.metric, mode=self.mode, patience=self.patience, min_delta=self.min_delta)


@dataclass(frozen=True, kw_only=True)
class Answers(Component):
    """Lets the model answer held-out documents, such as describing images, and logs the share of exact matches: at the end of the
    run, and every N steps if set. The prompt of a document is the part before its first token with loss."""

    key_class: ClassVar = FREE

    sets: tuple[str, ...] = ()
    """Held-out sets; by default all sets whose documents have a prompt."""
    count: Annotated[int, Gt(0)] = 64
    """Maximum number of documents per set, taken at equal distances."""
    shown: Annotated[int, Ge(0)] = 16
    """Answers per set, with their images, to keep for the report; wrong answers come first."""
    every: Annotated[int, Ge(0)] = 0
    """Optimizer steps between answers; 0 answers only at the end."""
    max_tokens: Annotated[int, Gt(0)] = 256
    """Maximum number of tokens of an answer."""
    weights: Literal["model", "ema"] = "model"
    """Weights to use: the model's, or their average of hook `ema`."""

    def build(self) -> "Hook":
        from forge_train.hooks.samples import AnswersHook

        return AnswersHook(self.sets, self.count, self.shown, self.every, self.max_tokens, self.weights)


@dataclass(frozen=True, kw_only=True)
class Sample(Component):
    """Generates text from prompts, for the terminal and the report: at the end of the run, and every N steps if set."""

    key_class: ClassVar = FREE

    prompts: list[str] = field(default_factory=lambda: ["The "])
    """Texts to continue."""
    every: Annotated[int, Ge(0)] = 0
    """Optimizer steps between samples; 0 samples only at the end."""
    max_tokens: Annotated[int, Gt(0)] = 96
    """Maximum number of tokens to generate per prompt."""
    temperature: Annotated[float, Ge(0)] = 0.8
    """Divides the logits before sampling; 0 takes the most likely token."""
    top_k: Annotated[int, Gt(0)] | None = None
    """Samples among the k most likely tokens."""
    top_p: Annotated[float, Gt(0), Le(1)] = 0.95
    """Samples among the fewest most likely tokens whose probabilities sum to this value."""
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    """Excludes tokens below this share of the largest probability."""
    repetition_penalty: Annotated[float, Gt(0)] = 1.0
    """Above 1, tokens that already occurred become less likely."""
    weights: Literal["model", "ema"] = "model"
    """Weights to use: the model's, or their average of hook `ema`."""

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
