"""Generation with a cache: prompts of any lengths in one batch, greedy or sampled, token by token; and the text of new tokens.

decode(prompt + new) differs from decode(prompt) + decode(new), because decoders remove a space at the beginning of a text, and
the bytes of one character may be several tokens. So `NewText` decodes new tokens after those of the prompt and removes the
prompt's text.
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
    """Prompts or settings are invalid."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; by default the most likely one.

    The filters apply in the order of the fields, each to the result of the previous one; the next token is drawn from the rest,
    by probability.

    Attributes:
        repetition_penalty: makes tokens of the prompt and of the row so far less likely (above 1) or more likely (below 1).
        temperature: divisor of the logits; 0 takes the most likely token.
        top_k: keep the k most likely tokens.
        top_p: keep the fewest tokens that together have this probability.
        min_p: keep tokens that are at least this fraction as likely as the most likely one.
        seed: seed of the draws. The draws of row r in a batch of n do not depend on the other rows.

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
        # Negated comparisons also refuse NaN.
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
        """Returns logits (B, vocab) in fp32. For tokens that `seen` (B, vocab) marks, positive logits are divided by the
        repetition penalty and negative ones multiplied (Keskar et al., 2019)."""
        wide = logits.float()
        return torch.where(seen, torch.where(wide < 0, wide * self.repetition_penalty, wide / self.repetition_penalty), wide)

    def distribution(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns, for a temperature above 0, probabilities in descending order and their tokens, (B, vocab) or (B, top_k) each,
        fp64 on the CPU."""
        scaled = logits.detach().cpu().double() / self.temperature
        size = scaled.shape[-1] if self.top_k is None else min(self.top_k, scaled.shape[-1])
        best, tokens = scaled.topk(size, dim=-1)
        probabilities = best.softmax(dim=-1)
        if self.top_p is not None:
            # A token stays if those before it have less than top_p together, so the first one always stays.
            before = probabilities.cumsum(dim=-1) - probabilities
            probabilities = probabilities.where(before < self.top_p, 0.0)
        if self.min_p is not None:
            probabilities = probabilities.where(probabilities >= self.min_p * probabilities[:, :1], 0.0)
        if self.top_p is not None or self.min_p is not None:
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities, tokens


GREEDY = Sampling()
"""Takes the most likely token."""


class Sampler:
    """Chooses one token per row and call.

    Each call draws one number per row on the CPU and inverts the cumulative distribution in fp64, so devices with equal logits
    choose equal tokens.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """(B, vocab) -> (B,) int64 on the CPU. `seen` (B, vocab) marks the tokens to which a repetition penalty applies."""
        if seen is not None:
            logits = self.sampling.penalized(logits, seen)
        if self.sampling.temperature == 0:
            return logits.argmax(dim=-1).cpu()
        probabilities, tokens = self.sampling.distribution(logits)
        draws = torch.rand(logits.shape[0], 1, generator=self._generator, dtype=torch.float64)
        cumulative = probabilities.cumsum(dim=-1)
        # Scaled by the computed sum, so that rounding never selects a token with probability 0.
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
    """Continues each prompt; returns the new tokens of each row, with its end-of-sequence token if it reached one.

    Args:
        model: a whole decoder; its training mode is restored afterwards.
        prompts: token ids of each row, none empty; lengths may differ.
        sampling: how each token is chosen.
        max_tokens: maximum number of new tokens per row.
        eos: id or ids at which a row stops.
        stop: text or texts at which a row stops, in the text that new tokens add to the prompt (`NewText`); the token that
            completes one is the row's last. See `before_stop`.
        decode: tokens -> their text; required by `stop`.
        prefill: maximum number of prompt tokens per forward; None: all. It limits memory and does not change results.
        on_token: called with (row, token) for each new token.
        agree: maps the tokens (B,) that this process chose to those that all processes use, if several hold the model together;
            otherwise rounding could make them differ, and one that stops earlier would leave the others waiting.
        inputs: extras of the prompts besides tokens, such as images; then each prompt is processed in one forward.

    Raises:
        GenerationError: a prompt is empty, an id is not in the vocabulary, or there are more tokens than `max_length`.
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
    """Like `generate`, one step at a time: yields each row's new token, None after the row has stopped.

    Errors are raised by the call itself, before the first step.
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
    # Shorter rows are padded with token 0; slots are positions, so the padding does not affect any result.
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
        tokens_of_rows = chosen.tolist()
        yield [token if runs else None for token, runs in zip(tokens_of_rows, running, strict=True)]
        for row, token in zip(rows, tokens_of_rows, strict=True):
            row.append(token)
        if seen is not None:
            seen.scatter_(1, chosen.to(device).unsqueeze(1), True)
        running = [runs and not ends(index, row) for index, (row, runs) in enumerate(zip(rows, running, strict=True))]
        if not any(running) or step + 1 == max_tokens:
            return
        _tell(cache, known := [length + runs for length, runs in zip(known, running, strict=True)])
        logits = _forward(model, chosen.to(device).unsqueeze(1), (lengths + step).unsqueeze(1), cache)[:, 0]


def _tell(cache: KVCache | Mapping[int, KVCache], lengths: list[int]) -> None:
    """Sets the number of tokens without padding in the cache, or in those of pipeline stages."""
    for part in cache.values() if isinstance(cache, Mapping) else (cache,):
        part.lengths = lengths


def _prefill(model: Decoder, tokens: Tensor, lengths: Tensor, cache: KVCache, chunk: int, inputs: Mapping[str, Tensor]) -> Tensor:
    """Runs the prompts with the cache; returns the logits (B, vocab) at the last token of each row."""
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
    # Mode and gradients are set around each forward only, so an abandoned iterator has no lasting effect.
    # Compiled blocks run eagerly, because every length would be compiled into a graph of its own.
    with torch.no_grad(), evaluating(model), torch.compiler.set_stance("force_eager"):
        logits = model(tokens, positions=positions, cache=cache, at=at, **inputs)
    assert isinstance(logits, Tensor)
    return logits


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Context with all modules in evaluation mode; restores their modes afterwards."""
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
    """Returns a function (index of a prompt, its new tokens) -> whether the last token ends the row."""
    tokens = frozenset(() if eos is None else (eos,) if isinstance(eos, int) else eos)
    texts = texts_of(stop)
    if not all(texts):
        raise GenerationError("a stop text is empty, so every row would stop at once; remove it")
    if texts and decode is None:
        raise GenerationError("stop texts need decode, a function from tokens to text; pass it")
    added = [NewText(decode, prompt) for prompt in prompts] if texts and decode is not None else []

    def ends(index: int, new: list[int]) -> bool:
        if new[-1] in tokens:
            return True
        if not added:
            return False
        # Decodes all new tokens, because a stop text may span tokens and a character may need several tokens.
        text = added[index](new)
        return any(end in text for end in texts)

    return ends


def check_request(model: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int, prefill: int | None) -> None:
    """Refuses requests that `stream` does not support."""
    if (shape := getattr(model, "shape", None)) is None:
        raise GenerationError(
            f"{type(model).__name__} does not generate text, which needs `shape` and a cache, as forge_models.Decoder has them"
        )
    if not prompts:
        raise GenerationError("prompts must not be empty")
    if not getattr(model.shape, "causal", True):
        raise GenerationError(
            "model.attention.causal = false: the model fills in masked tokens and cannot generate text token by token; use a "
            "causal model"
        )
    if labels := getattr(model.shape, "labels", 0):
        raise GenerationError(
            f"the model is a classifier of {labels} labels (model.labels) and predicts no next token; use `forge-train evaluate` "
            "on labeled texts, or generate with the model that it started from"
        )
    if max_tokens < 1:
        raise GenerationError(f"max_tokens {max_tokens} must be at least 1")
    if prefill is not None and prefill < 1:
        raise GenerationError(f"prefill {prefill} must be at least 1 token")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise GenerationError(f"prompt {row} is empty; start it with the tokenizer's beginning-of-text token")
        wrong = next((token for token in prompt if not 0 <= token < shape.vocab_size), None)
        if wrong is not None:
            raise GenerationError(
                f"prompt {row} has token {wrong}, but the vocabulary has {shape.vocab_size} tokens; use the model's tokenizer"
            )
    longest = max(len(prompt) for prompt in prompts)
    limits = {"max_length": shape.max_length, "the original_max_length of dynamic rope scaling": model.cache_limit}
    for name, limit in limits.items():
        # The last token is never an input, but counts, so that a full row can be trained on.
        if limit is not None and longest + max_tokens > limit:
            raise GenerationError(
                f"a prompt of {longest} tokens and {max_tokens} new ones do not fit {name} {limit}; "
                f"ask for at most {max(0, limit - longest)} new tokens"
            )


Decode = Callable[[list[int]], str]

BROKEN = "\ufffd"
"""What decoders write for bytes that form no character."""

_CONTEXT = 32
"""Minimum number of prompt tokens that are decoded with the new ones; decoders look back at most to the last word."""


class NewText:
    """The text that new tokens add: decode(prompt + new) without the beginning that it shares with decode(prompt)."""

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode = decode
        size = _CONTEXT
        while True:  # control tokens have no text, so the last text of the prompt may be before many of them
            self._context = [int(token) for token in prompt[-size:]]
            self._before = decode(self._context)
            if self._before or size >= len(prompt):
                return
            size *= 2

    def __call__(self, new: Sequence[int]) -> str:
        """Returns the text that `new` adds."""
        whole = self._decode([*self._context, *(int(token) for token in new)])
        return whole[_shared(self._before, whole) :]


class StreamedText:
    """Splits the text of new tokens into pieces that are final: joined, they are the whole text.

    Holds back a character whose bytes are incomplete, and text that a byte without a character would change, because some
    decoders make a whole sequence of bytes unreadable if one byte does not fit.

    Args:
        broken: an id whose bytes form no character by themselves, if the tokenizer has one; see `broken_id`.
    """

    def __init__(self, text: NewText, stops: Sequence[str] = (), broken: int | None = None) -> None:
        self._text, self._stops, self._broken = text, tuple(stops), broken
        self._shown = ""
        self.stopped = False

    def add(self, new: Sequence[int]) -> str:
        """Returns the next piece of the text of all new tokens; `stopped` says whether it ended at a stop text."""
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
        """Returns the rest of the text when no token follows."""
        return self._show(before_stop(self._text(new), self._stops))

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        self._shown += piece
        return piece

    def _open_stop(self, text: str) -> int:
        """Returns the index in `text` at which a possible beginning of a stop text starts."""
        sizes = (
            size for stop in self._stops for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])
        )
        return len(text) - max(sizes, default=0)


def broken_id(decode: Decode, vocab_size: int) -> int | None:
    """Returns an id that is a byte of a longer character; None for tokenizers of words or characters."""
    return next((index for index in range(vocab_size) if decode([index]) == BROKEN), None)


def before_stop(text: str, stop: str | Sequence[str]) -> str:
    """Returns `text` up to the first stop text."""
    places = [text.find(end) for end in texts_of(stop)]
    return text[: min((place for place in places if place >= 0), default=len(text))]


def texts_of(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Returns one stop text or several as a tuple."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _shared(one: str, other: str) -> int:
    """Returns the length of the common beginning of two texts."""
    if other.startswith(one):
        return len(one)
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
