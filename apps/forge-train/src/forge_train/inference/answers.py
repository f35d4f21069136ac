"""A model that answers the requests of evaluations: log-likelihoods of given answers, and generated answers, in any layout.

Prompts are token ids, and may have images. No library of tasks is needed here.
"""

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from forge_core.errors import ForgeError
from forge_core.protocols.data import Tokenizer
from forge_models.generation import NewText, Sampling, before_stop, generate
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.placement.topology import Topology

_log = logging.getLogger(__name__)
NEW_TOKENS = 256
"""New tokens for a task that does not set their number; the default of the LM Evaluation Harness."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class ScoredAnswer:
    """A text whose last tokens are scored.

    Attributes:
        read: ids that the model reads; at least as many as `predicted`.
        predicted: ids at the end of the text; the last one is not read.
        inputs: further inputs of the model, see `forge_vlm.data.prompts.Prompt`.
    """

    read: list[int]
    predicted: list[int]
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class AnswerPrompt:
    """Ids that the model continues, and further inputs; see `forge_vlm.data.prompts.Prompt`."""

    ids: list[int]
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationSettings:
    """How a task wants answers to be generated: up to the first of the texts `until`, at most `tokens` new tokens."""

    until: tuple[str, ...]
    tokens: int
    sampling: Sampling

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "GenerationSettings":
        """Reads the `generation_kwargs` of a task; decoding is greedy unless `do_sample` or `temperature` requests sampling.

        Raises:
            ForgeError: an option is not supported.
        """
        rest = dict(given)
        until = rest.pop("until", ())
        tokens = [rest.pop(name) for name in ("max_gen_toks", "max_new_tokens") if name in rest]
        sampled = rest.pop("do_sample", rest.get("temperature", 0) > 0)
        chosen = {name: rest.pop(name) for name in ("temperature", "top_k", "top_p", "min_p") if name in rest}
        penalty = rest.pop("repetition_penalty", 1.0)
        if rest:
            raise ForgeError(
                f"a task sets {', '.join(sorted(rest))} in generation_kwargs, which Forge does not support; remove the option"
            )
        options: dict[str, Any] = {"temperature": 1.0} | chosen if sampled else {"temperature": 0.0}
        sampling = Sampling(repetition_penalty=penalty, **options)
        texts = [until] if isinstance(until, str) else list(until or ())
        return cls(tuple(text for text in texts if text), tokens[0] if tokens else NEW_TOKENS, sampling)


class AnswerModel:
    """Answers requests with the current weights of a model. Every rank makes the same calls; data ranks share the rows of
    log-likelihoods, and every rank generates all answers.

    Args:
        model: the model.
        tokenizer: the tokenizer of the model.
        ends: ids that end an answer.
        batch: rows per forward and rank.
        before: called on all ranks before each forward of new texts, with the number of earlier forwards; may raise to stop.
    """

    def __init__(
        self,
        model: ParallelModel,
        tokenizer: Tokenizer,
        *,
        ends: Collection[int] = (),
        batch: int = 8,
        before: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.laid_out, self.batch, self.ends = model, batch, frozenset(ends)
        self.whole: Any = model.whole()
        self.max_length: int = self.whole.shape.max_length
        self._tokenizer, self._before, self._count = tokenizer, before, itertools.count()
        self._told = False

    @property
    def topology(self) -> Topology:
        """This rank's coordinates and process groups."""
        return self.laid_out.topology

    def scores(self, items: Sequence[Item], answer: Callable[[Item], ScoredAnswer]) -> list[tuple[float, bool]]:
        """Collective: returns for each item log p(answer | the text before it) in nats, and whether greedy decoding would
        generate the answer.

        Args:
            items: the requests, the same on all ranks; neighbors form a batch.
            answer: makes the tokens of a request when its batch comes; not called for the rows of other data ranks, except for
                the first row of a batch.
        """
        topology = self.topology
        found = torch.zeros(len(items), 2, dtype=torch.float64)
        with self._inference():
            for first in range(0, len(items), self.batch * topology.data_size):
                chunk = range(first, min(first + self.batch * topology.data_size, len(items)))
                self._before(next(self._count))
                count = -(-len(chunk) // topology.data_size)
                mine = chunk[topology.data_rank * count : (topology.data_rank + 1) * count]
                # Every rank runs the same number of forwards: a rank without a row uses the first one, and counts nothing.
                rows = [answer(items[index]) for index in mine or chunk[:1]]
                logits = self._logits(rows)
                for row, index, scored in zip(logits, mine, rows, strict=False):
                    found[index] = _score(row, scored)
        if topology.size > 1:
            if any(topology.layout.data_rank(rank) == topology.data_rank for rank in range(topology.rank)):
                found.zero_()  # an earlier rank has the same rows and contributes their scores
            found = topology.all_reduce(found.to(topology.device)).cpu()
        return [(likelihood, bool(greedy)) for likelihood, greedy in found.tolist()]

    def texts(self, items: Sequence[Item], prompt: Callable[[Item], AnswerPrompt], settings: GenerationSettings) -> list[str]:
        """Collective: returns the text that the model generates for each item, without what ended it. An answer ends at the
        latest where the model's maximum length does.

        Raises:
            ForgeError: a prompt is empty, or leaves no room for a new token.
        """
        texts: list[str] = []
        with self._inference():
            for first in range(0, len(items), self.batch):
                self._before(next(self._count))
                texts += self._batch_of_texts([prompt(item) for item in items[first : first + self.batch]], settings)
        return texts

    def _batch_of_texts(self, prompts: Sequence[AnswerPrompt], settings: GenerationSettings) -> list[str]:
        # Prompts with another limit are another batch, so that an answer does not depend on its neighbors.
        limits = [min(settings.tokens, self.max_length - len(prompt.ids)) for prompt in prompts]
        if min(limits) < 1:
            raise ForgeError(
                f"a question has {max(len(prompt.ids) for prompt in prompts)} tokens with its images, which leaves no room for "
                f"an answer, because model.max_length = {self.max_length}; leave the question out, or show fewer frames or tiles"
            )
        if min(limits) < settings.tokens and not self._told:
            self._told = True
            _log.warning("some answers have less than %d tokens, because model.max_length = %d", settings.tokens, self.max_length)
        texts: dict[int, str] = {}
        for limit in sorted(set(limits)):
            places = [place for place, own in enumerate(limits) if own == limit]
            made = self._generated([prompts[place] for place in places], replace(settings, tokens=limit))
            texts |= zip(places, made, strict=True)
        return [texts[place] for place in range(len(prompts))]

    def _generated(self, prompts: Sequence[AnswerPrompt], settings: GenerationSettings) -> list[str]:
        device = self.topology.device
        rows = generate(
            self.whole,
            [prompt.ids for prompt in prompts],
            settings.sampling,
            max_tokens=settings.tokens,
            eos=tuple(self.ends),
            stop=settings.until,
            decode=self._decode,
            agree=self.topology.from_first,
            inputs={name: value.to(device) for name, value in _together([prompt.inputs for prompt in prompts]).items()},
        )
        kept = [row[:-1] if row and row[-1] in self.ends else row for row in rows]
        added = [NewText(self._decode, prompt.ids)(row) for prompt, row in zip(prompts, kept, strict=True)]
        return [before_stop(text, settings.until) for text in added]

    def _decode(self, ids: list[int]) -> str:
        """Returns the text of ids; placeholders of images and padding of the vocabulary have none."""
        return self._tokenizer.decode([index for index in ids if index < self._tokenizer.vocab_size])

    @contextmanager
    def _inference(self) -> Iterator[None]:
        # Compiled blocks run eagerly, since each batch length would compile another graph.
        with self.laid_out.inference(whole_sequences=True), torch.compiler.set_stance("force_eager"):
            yield

    def _logits(self, rows: Sequence[ScoredAnswer]) -> Tensor:
        """Computes logits (B, T, vocab) of rows that are padded with zeros at their ends."""
        layout, device = self.topology.layout, self.topology.device
        tokens = torch.zeros(len(rows), max(len(row.read) for row in rows), dtype=torch.int64)
        for place, row in zip(tokens, rows, strict=True):
            place[: len(row.read)] = torch.tensor(row.read)
        tokens = tokens.to(device)
        inputs = {name: value.to(device) for name, value in _together([row.inputs for row in rows]).items()}
        if layout.pp == layout.cp == 1:
            return self.whole(tokens, **inputs)
        # With a cache, context-parallel ranks and pipeline stages process whole sequences.
        return self.whole(tokens, positions=None, cache=self.whole.new_cache(*tokens.shape), **inputs)


def _together(inputs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the images of some rows as the inputs of one batch; see `forge_data.loading.items.stacked`."""
    if not any(inputs):
        return {}
    from forge_data.loading.items import stacked
    from forge_vlm.data.store import EXTRAS, TIMES

    timed = any(TIMES in one for one in inputs)
    rows = [[(one[EXTRAS[0]].numpy(), one[TIMES].numpy() if timed else None)] if one else [] for one in inputs]
    return stacked((*EXTRAS, TIMES) if timed else EXTRAS, rows)


def _score(logits: Tensor, scored: ScoredAnswer) -> Tensor:
    """Returns (2,) fp64 for one row (T, vocab): the sum of log p, and 1 if every predicted token is the most likely one."""
    here = logits[len(scored.read) - len(scored.predicted) : len(scored.read)]
    wide = here.to(torch.promote_types(here.dtype, torch.float32)).log_softmax(dim=-1)
    tokens = torch.tensor(scored.predicted, device=here.device)
    greedy = (here.argmax(dim=-1) == tokens).all()
    return torch.stack([wide.gather(1, tokens[:, None]).sum().double(), greedy.double()]).cpu()
