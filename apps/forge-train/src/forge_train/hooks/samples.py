"""Hooks `sample` and `answers`: text that the model generates during training.

Methods import numpy and the model's code, so that importing this module does not.
"""

import base64
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from forge_core.component import FREE
from forge_core.errors import DataError, ForgeError, did_you_mean
from forge_core.files import replace_file
from forge_core.protocols.run import Run
from forge_train.directory import ANSWERS, SAMPLES
from forge_train.hooks.periodic import Periodic, length_limit

if TYPE_CHECKING:
    from forge_data.loading.evaluation import Question

_log = logging.getLogger(__name__)


class _Left(Exception):
    """A stop request arrived between two tokens."""


@dataclass(kw_only=True)
class Sample(Periodic):
    """Generates text from prompts, for the terminal and the report: at the end of the run, and every N steps if set.

    All ranks generate together, since a sharded model needs all of them. The newest samples are in `samples.json` in the run's
    directory, for the report.
    """

    key_class: ClassVar = FREE
    leisurely = True
    observes = True
    generates = True

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

    def check(self, run: Run) -> None:
        """Refuses a run without a tokenizer, a model that does not generate, and prompts that are empty or leave no room for the
        new tokens."""
        if run.data.tokenizer is None:
            raise ForgeError("hook 'sample' needs a tokenizer: add [data.tokenizer], or remove the hook")
        if not hasattr(run.model.parts[0], "shape"):  # a model of a plugin
            raise ForgeError(
                f"hook 'sample': {type(run.model.parts[0]).__name__} does not generate text, which needs `shape` and a cache, as "
                "forge_models.Decoder has them; remove the hook"
            )
        room = length_limit(run)
        for place, prompt in enumerate(self._prompts(run)):
            if not prompt:
                raise ForgeError(f"hook 'sample': prompt {place} is empty, but generation needs at least one token; remove it")
            if room is not None and len(prompt) + self.max_tokens > room:
                raise ForgeError(
                    f"hook 'sample': prompt {place} with {len(prompt)} tokens and max_tokens = {self.max_tokens} exceed "
                    f"the model's limit of {room} tokens; shorten the prompt or lower max_tokens"
                )

    def _prompts(self, run: Run) -> list[list[int]]:
        tokenizer = run.data.tokenizer
        assert tokenizer is not None, "`check` refuses a run without a tokenizer"
        return [[*tokenizer.prefix, *map(int, tokenizer.encode(prompt))] for prompt in self.prompts]

    def act(self, run: Run) -> None:
        """Continues each prompt, prints and saves the texts; a stop request ends it without a result."""
        from forge_models.generation import NewText, Sampling, generate

        tokenizer = run.data.tokenizer
        assert tokenizer is not None, "`check` refuses a run without a tokenizer"
        sampling = Sampling(
            repetition_penalty=self.repetition_penalty,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=run.job.job.seed,
        )
        prompts = self._prompts(run)
        count = itertools.count()

        def agree(tokens: Any) -> Any:
            if self.leaves(run, "sampling", next(count)):
                raise _Left
            return run.topology.from_first(tokens)

        try:
            other = nullcontext() if self.weights == "model" else run.weights(self.weights)
            with other, run.model.inference(whole_sequences=True):
                generated = generate(
                    run.model.whole(), prompts, sampling, max_tokens=self.max_tokens, eos=tokenizer.eos, agree=agree
                )
        except _Left:
            return
        if run.topology.rank != 0:
            return
        texts = [NewText(tokenizer.decode, prompt)(tokens) for prompt, tokens in zip(prompts, generated, strict=True)]
        samples = [
            {"step": run.state.step, "prompt": prompt, "text": text, "temperature": self.temperature}
            for prompt, text in zip(self.prompts, texts, strict=True)
        ]
        try:
            replace_file(run.directory / SAMPLES, json.dumps(samples, indent=1, ensure_ascii=False).encode())
        except OSError as cause:  # a full disk must not end the run
            _log.warning("samples could not be written: %s", cause)
        if run.console is not None:
            for sample in samples:
                run.console.print(f"step {run.state.step} | {sample['prompt']}{sample['text']}", highlight=False, markup=False)


_TOGETHER = 32
"""Maximum number of prompts in one batch."""


@dataclass(kw_only=True)
class Answers(Periodic):
    """Lets the model answer held-out documents, such as describing images, and logs the share of exact matches: at the end of the
    run, and every N steps if set. The prompt of a document is the part before its first token with loss.

    The model continues prompts greedily. The first answers, with their images, are in `answers.json` in the run's directory, for
    the report.
    """

    key_class: ClassVar = FREE
    leisurely = True
    observes = True
    generates = True

    sets: tuple[str, ...] = ()
    """Held-out sets; by default all sets whose documents have a prompt."""
    count: Annotated[int, Gt(0)] = 64
    """Maximum number of documents per set, taken at equal distances."""
    shown: Annotated[int, Ge(0)] = 16
    """Answers per set, with their images, to keep for the report; wrong answers come first."""
    every: Annotated[int, Ge(0)] = 0
    """Optimizer steps between answers; 0 answers only at the end."""
    at_start: bool = False
    """Also answer with the initial weights, before the first step; the report keeps these answers beside the newest ones."""
    printed: Annotated[int, Ge(0)] = 0
    """Number of questions per set, the first ones, to print with their answers."""
    max_tokens: Annotated[int, Gt(0)] = 256
    """Maximum number of tokens of an answer."""
    weights: Literal["model", "ema"] = "model"
    """Weights to use: the model's, or their average of hook `ema`."""

    def __post_init__(self) -> None:
        self.asked: dict[str, list[Question]] = {}

    def start(self, run: Run) -> None:
        """Answers with the initial weights if `at_start` is set."""
        super().start(run)
        if self.at_start and run.state.step == 0:
            self.once(run)

    def check(self, run: Run) -> None:
        """Selects the questions, and loads their images once.

        Raises:
            ForgeError: the run has no tokenizer, a set does not exist or has no questions, or a question is too long.
        """
        if run.data.tokenizer is None:
            raise ForgeError("hook 'answers' needs a tokenizer: add [data.tokenizer], or remove the hook")
        for name in self.sets:
            if name not in run.evaluations:
                raise ForgeError(
                    f"hook 'answers': held-out set {name!r} does not exist; {did_you_mean(name, list(run.evaluations))}"
                )
        from forge_data.loading.evaluation import questions

        for name in self.sets or run.evaluations:
            source = getattr(run.evaluations[name], "source", None)
            found = list(questions(source, self.count))
            if found:
                self._refuse_long(run, name, found)
                self._load(name, source, found)
                self.asked[name] = found
            elif self.sets:
                raise ForgeError(
                    f"hook 'answers': documents of held-out set {name!r} have no prompt (a part without loss) before an answer; "
                    "use a set with images or conversations"
                )
        if not self.asked:
            raise ForgeError(
                "hook 'answers' needs a held-out set whose documents have a prompt, such as images or questions; add such a set "
                "to [data.evaluation], or remove the hook"
            )

    def _refuse_long(self, run: Run, name: str, asked: "list[Question]") -> None:
        room = length_limit(run)
        for question in asked:
            given, new = len(question.prompt), min(self.max_tokens, len(question.answer))
            if room is not None and given + new > room:
                raise ForgeError(
                    f"hook 'answers': a document of held-out set {name!r} has a prompt of {given} tokens and an answer of {new}, "
                    f"but the model supports {room} in all; raise model.max_length, lower hooks.max_tokens, or remove the set"
                )

    def _load(self, name: str, source: Any, asked: "list[Question]") -> None:
        """Loads every item once, so that a missing item is reported before training rather than after it."""
        from forge_data.loading.evaluation import inputs_of

        for question in asked:
            try:
                inputs_of(source, [question])
            except DataError as cause:
                raise ForgeError(f"hook 'answers': held-out set {name!r}: {cause}") from cause

    def _together(self, run: Run, asked: "list[Question]") -> "Iterator[list[Question]]":
        """Yields batches of questions, such that the longest prompt and the longest answer of a batch fit the model together."""
        part: list[Question] = []
        room = length_limit(run)
        for question in asked:
            longer = [*part, question]
            new = min(self.max_tokens, max(len(each.answer) for each in longer))
            fits = room is None or max(len(each.prompt) for each in longer) + new <= room
            if part and (len(part) == _TOGETHER or not fits):
                yield part
                part = [question]
            else:
                part = longer
        yield part

    def act(self, run: Run) -> None:
        """Answers the questions, logs exact matches and saves answers; a stop request ends it without a result."""
        kept: list[dict[str, Any]] = []
        shares: dict[str, float] = {}
        try:
            other = nullcontext() if self.weights == "model" else run.weights(self.weights)
            with other, run.model.inference(whole_sequences=True):
                for name, asked in self.asked.items():
                    said = self._said(run, name, asked)
                    end = None if run.data.tokenizer is None else run.data.tokenizer.eos
                    right = [question.is_answered_by(tokens, end) for question, tokens in zip(asked, said, strict=True)]
                    shares[f"{name}/exact_match"] = sum(right) / len(right)
                    answers = self._shown(run, name, asked, said, right)
                    kept += sorted(answers, key=lambda answer: answer["right"])[: self.shown]
                    self._print(run, answers[: self.printed])
        except _Left:
            return
        run.log(shares)
        if run.topology.rank != 0:
            return
        try:
            before = self._first_answers(run) if self.at_start and run.state.step else []
            replace_file(run.directory / ANSWERS, json.dumps([*before, *kept], indent=1, ensure_ascii=False).encode())
        except OSError as cause:  # a full disk must not end the run
            _log.warning("answers could not be written: %s", cause)
        if run.console is not None:
            for name, share in shares.items():
                count = len(self.asked[name.rpartition("/")[0]])
                run.console.print(f"step {run.state.step}  {name} {share:.1%} of {count}", highlight=False, markup=False)

    @staticmethod
    def _first_answers(run: Run) -> list[dict[str, Any]]:
        """Returns the stored answers of the initial weights."""
        try:
            stored = json.loads((run.directory / ANSWERS).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # a resume elsewhere, or a file that was cut off
            return []
        return [answer for answer in stored if answer["step"] == 0]

    @staticmethod
    def _print(run: Run, answers: list[dict[str, Any]]) -> None:
        if run.topology.rank != 0 or run.console is None:
            return
        for answer in answers:
            verdict = "right" if answer["right"] else f"wrong, not {answer['answer']!r}"
            run.console.print(
                f"step {run.state.step}  {answer['prompt']!r} -> {answer['said']!r} ({verdict})", highlight=False, markup=False
            )

    def _said(self, run: Run, name: str, asked: "list[Question]") -> list[list[int]]:
        """Collective: returns the new tokens for each question, equal on all ranks."""
        from forge_data.loading.evaluation import inputs_of
        from forge_models.generation import generate

        tokenizer, source, said = run.data.tokenizer, getattr(run.evaluations[name], "source", None), list[list[int]]()
        assert tokenizer is not None, "`check` refuses a run without a tokenizer"
        count = itertools.count()

        def agree(tokens: Any) -> Any:
            if self.leaves(run, f"answering {name}", next(count)):
                raise _Left
            return run.topology.from_first(tokens)

        for part in self._together(run, asked):
            inputs = {key: value.to(run.topology.device) for key, value in inputs_of(source, part).items()}  # type: ignore[arg-type]
            most = max(len(question.answer) for question in part)
            prompts = [question.prompt.tolist() for question in part]
            tokens = generate(
                run.model.whole(),
                prompts,
                max_tokens=min(self.max_tokens, most),
                eos=tokenizer.eos,
                agree=agree,
                inputs=inputs or None,
            )
            said += [[int(token) for token in row] for row in tokens]
        return said

    def _shown(
        self, run: Run, name: str, asked: "list[Question]", said: list[list[int]], right: list[bool]
    ) -> list[dict[str, Any]]:
        """Returns the answers that are kept or printed, in the order of the questions: `shown` ones, wrong ones before right
        ones, and the first `printed` ones."""
        from forge_models.generation import NewText

        tokenizer, source = run.data.tokenizer, getattr(run.evaluations[name], "source", None)
        assert tokenizer is not None

        def text(ids: Any) -> str:
            """Decodes ids without image placeholders, which are not in the vocabulary, and without the end of the document."""
            return tokenizer.decode([int(token) for token in ids if token < tokenizer.vocab_size and token != tokenizer.eos])

        order = sorted(range(len(asked)), key=lambda number: right[number])[: self.shown]
        found = []
        for number in sorted({*order, *range(min(self.printed, len(asked)))}):
            question, picture = asked[number], getattr(source, "picture", None)
            added = NewText(text, question.prompt.tolist())
            pictures = [picture(item) for item in range(*question.items)] if picture is not None else []
            found.append(
                {
                    "step": run.state.step,
                    "set": name,
                    "prompt": text(question.prompt),
                    "answer": added(question.answer.tolist()),
                    "said": added(said[number]),
                    "right": right[number],
                    "pictures": [base64.b64encode(png).decode() for png in pictures],
                }
            )
        return found
