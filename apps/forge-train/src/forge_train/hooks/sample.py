"""Text from the model that is training."""

import itertools
import json
import logging
from typing import TYPE_CHECKING, Any

from forge_core.errors import ForgeError
from forge_train.hooks.periodic import Periodic

if TYPE_CHECKING:
    from forge_train.components.hooks import Sample

SAMPLES = "samples.json"
_log = logging.getLogger(__name__)


class _Left(Exception):
    """The run was asked to stop, between two tokens."""


class SampleHook(Periodic):
    """Continues the prompts on all ranks alike, since a sharded model answers only when all of them ask.

    The newest samples stand in `samples.json` of the run's directory, where the report finds them.
    """

    leisurely = True

    def __init__(self, config: "Sample", run: Any) -> None:
        if run.data.tokenizer is None:
            raise ForgeError("the hook 'sample' needs to read and write text: add [data.tokenizer], or leave the hook out")
        super().__init__(config.every)
        self.config = config

    def act(self, run: Any) -> None:
        """Generates from each prompt, prints and keeps the texts; a run that is asked to stop meanwhile leaves it."""
        from forge_models.generation.generate import generate
        from forge_models.generation.sampling import Sampling

        config, tokenizer = self.config, run.data.tokenizer
        sampling = Sampling(
            repetition_penalty=config.repetition_penalty,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            seed=run.job.job.seed,
        )
        prompts = [list(map(int, tokenizer.encode(prompt))) for prompt in config.prompts]
        count = itertools.count()

        def agree(tokens: Any) -> Any:
            if self.leaves(run, "sampling", next(count)):
                raise _Left
            return run.topology.from_first(tokens)

        try:
            with run.model.inference(whole_sequences=True):
                generated = generate(
                    run.model.part, prompts, sampling, max_tokens=config.max_tokens, eos=tokenizer.eos, agree=agree
                )
        except _Left:
            return
        if run.topology.rank != 0:
            return
        texts = [tokenizer.decode([int(token) for token in tokens]) for tokens in generated]
        samples = [
            {"step": run.state.step, "prompt": prompt, "text": text, "temperature": config.temperature}
            for prompt, text in zip(config.prompts, texts, strict=True)
        ]
        try:
            (run.directory / SAMPLES).write_text(json.dumps(samples, indent=1, ensure_ascii=False), encoding="utf-8")
        except OSError as cause:  # a full disk is no reason to lose the run
            _log.warning("samples could not be kept: %s", cause)
        if run.console is not None:
            for sample in samples:
                run.console.print(f"step {run.state.step} | {sample['prompt']}{sample['text']}", highlight=False, markup=False)
