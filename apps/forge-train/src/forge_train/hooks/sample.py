"""Generates sample text during training."""

import itertools
import json
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from forge_core.durable_files import replace_file
from forge_core.errors import ForgeError
from forge_core.protocols.run import Run
from forge_train.directory import SAMPLES
from forge_train.hooks.periodic import Periodic, length_limit

_log = logging.getLogger(__name__)


class _Left(Exception):
    """The run was asked to stop, between two tokens."""


class SampleHook(Periodic):
    """Continues the prompts on all ranks alike, since a model that is cut answers only when all of them ask.

    The newest samples are in `samples.json` of the run's directory, where the report finds them.
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
                raise ForgeError(f"hook 'sample': prompt {place} is empty; a continuation needs a token to begin with")
            if room is not None and len(prompt) + self.max_tokens > room:
                raise ForgeError(
                    f"hook 'sample': prompt {place} of {len(prompt)} tokens and max_tokens = {self.max_tokens} new ones are more "
                    f"than the {room} that the model takes; shorten the prompt or lower max_tokens"
                )

    def _prompts(self, run: Run) -> list[list[int]]:
        tokenizer = run.data.tokenizer
        assert tokenizer is not None, "`check` refuses a run without a tokenizer"
        return [[*tokenizer.prefix, *map(int, tokenizer.encode(prompt))] for prompt in self.prompts]

    def act(self, run: Run) -> None:
        """Generates from each prompt, prints and keeps the texts; a run that is asked to stop meanwhile leaves it."""
        from forge_models.generation.generate import generate
        from forge_models.generation.sampling import Sampling
        from forge_models.generation.text import NewText

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
