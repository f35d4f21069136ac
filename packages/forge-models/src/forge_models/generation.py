"""Generation with a cache: prompts of any lengths in one batch, greedy or sampled, token by token; and the text of new tokens.

decode(prompt + new) is not decode(prompt) + decode(new): decoders remove a space at the beginning of a text, and the bytes of
one character may be several tokens. So `NewText` decodes new tokens after those of the prompt, and removes the prompt's text.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from forge_core.errors import ForgeError
from forge_models.blocks.cache import KVCache
from forge_models.decoder import Decoder


class GenerationError(ForgeError):
    """Prompts or settings from which nothing can be generated."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; by default the most likely one.

    The cuts apply in the order of the fields, each to what the one before it left, and what is left is drawn by its
    share.

    Attributes:
        repetition_penalty: tokens of the prompt and of the row so far get less likely (above 1) or more (below).
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: draw among the k most likely tokens only.
        top_p: then among the fewest of these that hold this probability together.
        min_p: then among those at least this fraction as likely as the most likely one.
        seed: of the draws. Row r of a batch of n gets the same draws for any other rows.

    Raises:
        GenerationError: a setting is out of range.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        # Written so that not-a-number is refused too.
        if not self.repetition_penalty > 0:
            raise GenerationError(f"repetition_penalty {self.repetition_penalty} must be above 0")
        if not self.temperature >= 0:
            raise GenerationError(f"temperature {self.temperature} must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise GenerationError(f"top_k {self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise GenerationError(f"top_p {self.top_p} must be in (0, 1]")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise GenerationError(f"min_p {self.min_p} must be in [0, 1]")

    def penalized(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Logits (B, vocab) in fp32; of the tokens that `seen` (B, vocab) marks, positive ones are divided by the
        repetition penalty and negative ones multiplied (Keskar et al., 2019)."""
        wide = logits.float()
        return torch.where(seen, torch.where(wide < 0, wide * self.repetition_penalty, wide / self.repetition_penalty), wide)

    def distribution(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What is drawn from, for a temperature above 0: probabilities in descending order and their tokens, (B, vocab)
        or (B, top_k) each, fp64 on the CPU."""
        scaled = logits.detach().cpu().double() / self.temperature
        size = scaled.shape[-1] if self.top_k is None else min(self.top_k, scaled.shape[-1])
        best, tokens = scaled.topk(size, dim=-1)
        probabilities = best.softmax(dim=-1)
        if self.top_p is not None:
            # A token stays when those before it hold less than top_p: the first always does.
            before = probabilities.cumsum(dim=-1) - probabilities
            probabilities = probabilities.where(before < self.top_p, 0.0)
        if self.min_p is not None:
            probabilities = probabilities.where(probabilities >= self.min_p * probabilities[:, :1], 0.0)
        if self.top_p is not None or self.min_p is not None:
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities, tokens


GREEDY = Sampling()
"""The most likely token."""


class Sampler:
    """Chooses tokens, one of each row a call.

    A call draws one number per row on the CPU and inverts the cumulative distribution in fp64: the same tokens on every
    device that computes the same logits.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """(B, vocab) -> (B,) int64 on the CPU. `seen` (B, vocab) marks the tokens that a repetition penalty is for."""
        if seen is not None:
            logits = self.sampling.penalized(logits, seen)
        if self.sampling.temperature == 0:
            return logits.argmax(dim=-1).cpu()
        probabilities, tokens = self.sampling.distribution(logits)
        draws = torch.rand(logits.shape[0], 1, generator=self._generator, dtype=torch.float64)
        cumulative = probabilities.cumsum(dim=-1)
        # Scaled by the sum as it came out, so that rounding never points past the last token that can be drawn.
        place = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
        last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
        return tokens.gather(1, place.minimum(last)).squeeze(1)


_NO_INPUTS: Mapping[str, Tensor] = MappingProxyType({})


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = GREEDY,
    *,
    max_tokens: int,
    eos: int | Collection[int] | None = None,
    stop: str | Sequence[str] = (),
    decode: Callable[[list[int]], str] | None = None,
    prefill: int | None = None,
    on_token: Callable[[int, int], None] | None = None,
    agree: Callable[[Tensor], Tensor] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> list[list[int]]:
    """Continues each prompt; returns the new tokens of each row, with its end-of-sequence token if it came to one.

    Args:
        model: a whole decoder; its training mode is as before afterwards.
        prompts: token ids of each row, none empty; lengths may differ.
        sampling: how each token is chosen.
        max_tokens: new tokens of a row at most.
        eos: id or ids at which a row stops.
        stop: text or texts at which a row stops, in the text that new tokens add to the prompt (`NewText`); the
            token that completes one is the row's last. See `before_stop`.
        decode: tokens -> their text; needed by `stop`.
        prefill: prompt tokens taken at once at most; None = all. It bounds memory and changes no result.
        on_token: called with (row, token) for each new token.
        agree: tokens (B,) that this process chose -> those that all processes take, where several hold the model together.
            Each rounds in its own way, and one that stopped earlier would leave the others waiting.
        inputs: extras of the prompts, such as images, that the model takes besides tokens; then prompts are taken at once.

    Raises:
        GenerationError: for an empty prompt, ids outside of the vocabulary, or more tokens than `max_length`.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    options: dict[str, Any] = {"eos": eos, "stop": stop, "decode": decode, "prefill": prefill, "agree": agree, "inputs": inputs}
    for step in stream(model, prompts, sampling, max_tokens=max_tokens, **options):
        for row, token in enumerate(step):
            if token is not None:
                rows[row].append(token)
                if on_token is not None:
                    on_token(row, token)
    return rows


def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = GREEDY,
    *,
    max_tokens: int,
    eos: int | Collection[int] | None = None,
    stop: str | Sequence[str] = (),
    decode: Callable[[list[int]], str] | None = None,
    prefill: int | None = None,
    agree: Callable[[Tensor], Tensor] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> Iterator[list[int | None]]:
    """Like `generate`, one step at a time: yields each row's new token, None once the row has stopped.

    Faults are raised at the call, before the first step is asked for.
    """
    check_request(model, prompts, max_tokens, prefill)
    if inputs and prefill is not None:
        raise GenerationError(
            f"prefill {prefill} splits a prompt, but {', '.join(sorted(inputs))} cannot be split; leave prefill out"
        )
    ends = ends_of(prompts, eos, stop, decode)
    rows = [list(prompt) for prompt in prompts]
    return _steps(model, rows, max_tokens, Sampler(sampling), ends, prefill, agree, inputs or {})


def _steps(
    model: Decoder,
    prompts: list[list[int]],
    max_tokens: int,
    sampler: Sampler,
    ends: Callable[[int, list[int]], bool],
    prefill: int | None,
    agree: Callable[[Tensor], Tensor] | None,
    inputs: Mapping[str, Tensor],
) -> Iterator[list[int | None]]:
    device = next(model.parameters()).device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = max(len(prompt) for prompt in prompts)
    cache = model.new_cache(len(prompts), longest + max_tokens)
    _tell(cache, known := [len(prompt) for prompt in prompts])
    # A shorter row is filled up with token 0; the cache's rule "slot = position" keeps these out of every result.
    tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
    logits = _prefill(model, tokens, lengths, cache, prefill or longest, inputs)
    running = [True] * len(prompts)
    rows: list[list[int]] = [[] for _ in prompts]
    seen: Tensor | None = None
    if sampler.sampling.repetition_penalty != 1:
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=device)
        for mark, prompt in zip(seen, prompts, strict=True):
            mark[prompt] = True
    for step in range(max_tokens):
        chosen = sampler(logits, seen)
        chosen = chosen if agree is None else agree(chosen)
        found = chosen.tolist()
        yield [token if runs else None for token, runs in zip(found, running, strict=True)]
        for row, token in zip(rows, found, strict=True):
            row.append(token)
        if seen is not None:
            seen.scatter_(1, chosen.to(device).unsqueeze(1), True)
        running = [runs and not ends(index, row) for index, (row, runs) in enumerate(zip(rows, running, strict=True))]
        if not any(running) or step + 1 == max_tokens:
            return
        _tell(cache, known := [length + runs for length, runs in zip(known, running, strict=True)])
        logits = _forward(model, chosen.to(device).unsqueeze(1), (lengths + step).unsqueeze(1), cache)[:, 0]


def _tell(cache: KVCache | Mapping[int, KVCache], lengths: list[int]) -> None:
    """Tells the cache, or those of the stages of a pipeline, which tokens of each row are no padding."""
    for part in cache.values() if isinstance(cache, Mapping) else (cache,):
        part.lengths = lengths


def _prefill(model: Decoder, tokens: Tensor, lengths: Tensor, cache: KVCache, chunk: int, inputs: Mapping[str, Tensor]) -> Tensor:
    """Runs the prompts through the cache; returns the logits (B, vocab) at the last token of each row."""
    last: Tensor | None = None
    for start in range(0, tokens.shape[1], chunk):
        part = tokens[:, start : start + chunk]
        at = lengths - 1 - start
        here = (at >= 0) & (at < part.shape[1])
        logits = _forward(model, part, None, cache, at.clamp(0, part.shape[1] - 1), inputs)[:, 0]
        last = logits if last is None else torch.where(here.unsqueeze(1), logits, last)
    assert last is not None
    return last


def _forward(
    model: Decoder,
    tokens: Tensor,
    positions: Tensor | None,
    cache: KVCache,
    at: Tensor | None = None,
    inputs: Mapping[str, Tensor] = _NO_INPUTS,
) -> Tensor:
    # Mode and gradients are set around each forward only, so an abandoned iterator leaves nothing behind.
    # Compiled blocks run eagerly: each token has another length, and each length would be another graph.
    with torch.no_grad(), evaluating(model), torch.compiler.set_stance("force_eager"):
        logits = model(tokens, positions=positions, cache=cache, at=at, **inputs)
    assert isinstance(logits, Tensor)
    return logits


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Spans forwards in evaluation mode; afterwards every module is in the mode that it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def ends_of(
    prompts: Sequence[Sequence[int]],
    eos: int | Collection[int] | None,
    stop: str | Sequence[str],
    decode: Callable[[list[int]], str] | None,
) -> Callable[[int, list[int]], bool]:
    """Whether the new tokens of a prompt, given by its index, have come to their end with the last one."""
    tokens = frozenset(() if eos is None else (eos,) if isinstance(eos, int) else eos)
    texts = texts_of(stop)
    if not all(texts):
        raise GenerationError("a stop text is empty; every row would stop at once")
    if texts and decode is None:
        raise GenerationError("stop texts need decode, the function from tokens to text")
    added = [NewText(decode, prompt) for prompt in prompts] if texts and decode is not None else []

    def ends(index: int, new: list[int]) -> bool:
        if new[-1] in tokens:
            return True
        if not added:
            return False
        # All new tokens: a stop text may span tokens, and one character may need several of them.
        text = added[index](new)
        return any(end in text for end in texts)

    return ends


def check_request(model: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int, prefill: int | None) -> None:
    """Refuses what `stream` cannot continue; see there."""
    shape = model.shape
    if not prompts:
        raise GenerationError("prompts must not be empty")
    if max_tokens < 1:
        raise GenerationError(f"max_tokens {max_tokens} must be at least 1")
    if prefill is not None and prefill < 1:
        raise GenerationError(f"prefill {prefill} must be at least 1 token")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise GenerationError(f"prompt {row} is empty; start it with the tokenizer's beginning-of-text token")
        wrong = next((token for token in prompt if not 0 <= token < shape.vocab_size), None)
        if wrong is not None:
            raise GenerationError(f"prompt {row} holds token {wrong}; the vocabulary has {shape.vocab_size}")
    longest = max(len(prompt) for prompt in prompts)
    limits = {"max_length": shape.max_length, "the original_max_length of dynamic rope scaling": model.cache_limit}
    for name, limit in limits.items():
        # The last token is never read again, yet counts: a row that is filled up to max_length can be trained on.
        if limit is not None and longest + max_tokens > limit:
            raise GenerationError(
                f"a prompt of {longest} tokens and {max_tokens} new ones do not fit {name} {limit}; "
                f"ask for at most {max(0, limit - longest)} new tokens"
            )


Decode = Callable[[list[int]], str]

BROKEN = "\ufffd"
"""What decoders write for bytes that are no character."""

_CONTEXT = 32
"""Tokens of the prompt that are decoded with the new ones, at least: decoders look back no further than to the last word."""


class NewText:
    """decode(prompt + new) without the beginning that it shares with decode(prompt): what new tokens add to a text."""

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode = decode
        size = _CONTEXT
        while True:  # control tokens have no text, so that the beginning of a text may lie behind many of them
            self._context = [int(token) for token in prompt[-size:]]
            self._before = decode(self._context)
            if self._before or size >= len(prompt):
                return
            size *= 2

    def __call__(self, new: Sequence[int]) -> str:
        """The text that `new` adds."""
        whole = self._decode([*self._context, *(int(token) for token in new)])
        return whole[_shared(self._before, whole) :]


class Pieces:
    """The text of new tokens in pieces which, joined, are that text: none of them is taken back later.

    A character whose bytes are not complete is held back, and so is what a byte without a character would change: some decoders
    make a whole sequence of bytes unreadable by one that does not fit.

    Args:
        broken: an id whose bytes are no character by themselves, where the tokenizer has one; see `broken_id`.
    """

    def __init__(self, text: NewText, stops: Sequence[str] = (), broken: int | None = None) -> None:
        self._text, self._stops, self._broken = text, tuple(stops), broken
        self._shown = ""
        self.stopped = False

    def add(self, new: Sequence[int]) -> str:
        """What can be shown now of all new tokens, which was not yet; `stopped` says whether it ended at a stop text."""
        whole = self._text(new)
        end = before_stop(whole, self._stops)
        if len(end) < len(whole):
            self.stopped = True
            return self._show(end)
        decided = whole.rstrip(BROKEN)
        if self._broken is not None:
            decided = decided[: _shared(decided, self._text([*new, self._broken]))]
        return self._show(decided[: self._open_stop(decided)])

    def rest(self, new: Sequence[int]) -> str:
        """What is left to show when no token follows."""
        return self._show(before_stop(self._text(new), self._stops))

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._shown += piece
        return piece

    def _open_stop(self, text: str) -> int:
        """Where the beginning of a stop text begins that the end of `text` may be."""
        sizes = (
            size for stop in self._stops for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])
        )
        return len(text) - max(sizes, default=0)


def broken_id(decode: Decode, vocab_size: int) -> int | None:
    """An id that is a byte of a longer character, or None: of tokenizers of words or characters."""
    return next((index for index in range(vocab_size) if decode([index]) == BROKEN), None)


def before_stop(text: str, stop: str | Sequence[str]) -> str:
    """`text` up to where the first of the stop texts begins."""
    places = [text.find(end) for end in texts_of(stop)]
    return text[: min((place for place in places if place >= 0), default=len(text))]


def texts_of(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One stop text or several, as a tuple."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _shared(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    if other.startswith(one):
        return len(one)
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
