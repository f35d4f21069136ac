"""Hooks `sample` and `answers`: text that the model generates during training."""

import base64
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from forge_core.durable_files import replace_file
from forge_core.errors import DataError, ForgeError, did_you_mean
from forge_core.protocols.run import Run
from forge_data.loading.evaluation import Question, inputs_of, questions
from forge_train.directory import ANSWERS, SAMPLES
from forge_train.hooks.periodic import Periodic, length_limit

_log = logging.getLogger(__name__)


class _Left(Exception):
    """A stop request arrived between two tokens."""


class SampleHook(Periodic):
    """Continues prompts; all ranks generate together, since a sharded model needs all of them.

    Writes the newest samples to `samples.json` in the run's directory, for the report.
    """

    leisurely = True
    observes = True

    def __init__(
        self,
        prompts: Sequence[str] = ("The ",),
        every: int = 0,
        max_tokens: int = 96,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 0.95,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        weights: str = "model",
    ) -> None:
        super().__init__(every)
        self.prompts, self.max_tokens = prompts, max_tokens
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p
        self.repetition_penalty, self.weights = repetition_penalty, weights

    def check(self, run: Run) -> None:
        """Refuses a run without a tokenizer, and prompts that are empty or leave no room for the new tokens."""
        if run.data.tokenizer is None:
            raise ForgeError("hook 'sample' needs a tokenizer: add [data.tokenizer], or remove the hook")
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


class AnswersHook(Periodic):
    """Continues the prompts of held-out documents greedily, and logs the share of exact matches with the documents.

    Writes the first answers, with their images, to `answers.json` in the run's directory, for the report.
    """

    leisurely = True
    observes = True

    def __init__(self, sets: tuple[str, ...], count: int, shown: int, every: int, max_tokens: int, weights: str) -> None:
        super().__init__(every)
        self.sets, self.count, self.shown, self.max_tokens, self.weights = sets, count, shown, max_tokens, weights
        self.asked: dict[str, list[Question]] = {}

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

    def _refuse_long(self, run: Run, name: str, asked: list[Question]) -> None:
        room = length_limit(run)
        for question in asked:
            given, new = len(question.prompt), min(self.max_tokens, len(question.answer))
            if room is not None and given + new > room:
                raise ForgeError(
                    f"hook 'answers': a document of held-out set {name!r} has a prompt of {given} tokens and an answer of {new}, "
                    f"but the model supports {room} in all; raise model.max_length, lower hooks.max_tokens, or remove the set"
                )

    def _load(self, name: str, source: Any, asked: list[Question]) -> None:
        """Loads every item once, so that a missing item is reported before training rather than after it."""
        for question in asked:
            try:
                inputs_of(source, [question])
            except DataError as cause:
                raise ForgeError(f"hook 'answers': held-out set {name!r}: {cause}") from cause

    def _together(self, run: Run, asked: list[Question]) -> Iterator[list[Question]]:
        """Yields batches of questions, such that the longest prompt and the longest answer of a batch fit the model together."""
        room, part = length_limit(run), list[Question]()
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
                    kept += self._kept(run, name, asked, said, right)
        except _Left:
            return
        run.log(shares)
        if run.topology.rank != 0:
            return
        try:
            replace_file(run.directory / ANSWERS, json.dumps(kept, indent=1, ensure_ascii=False).encode())
        except OSError as cause:  # a full disk must not end the run
            _log.warning("answers could not be written: %s", cause)
        if run.console is not None:
            for name, share in shares.items():
                count = len(self.asked[name.rpartition("/")[0]])
                run.console.print(f"step {run.state.step}  {name} {share:.1%} of {count}", highlight=False, markup=False)

    def _said(self, run: Run, name: str, asked: list[Question]) -> list[list[int]]:
        """Collective: returns the new tokens for each question, equal on all ranks."""
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

    def _kept(self, run: Run, name: str, asked: list[Question], said: list[list[int]], right: list[bool]) -> list[dict[str, Any]]:
        """Returns the answers for the report: at most `shown`, wrong ones first."""
        from forge_models.generation import NewText

        tokenizer, source = run.data.tokenizer, getattr(run.evaluations[name], "source", None)
        assert tokenizer is not None

        def text(ids: Any) -> str:
            """Decodes ids without image placeholders, which are not in the vocabulary, and without the end of the document."""
            return tokenizer.decode([int(token) for token in ids if token < tokenizer.vocab_size and token != tokenizer.eos])

        order = sorted(range(len(asked)), key=lambda number: right[number])[: self.shown]
        found = []
        for number in order:
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
