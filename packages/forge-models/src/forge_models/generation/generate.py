"""Cached generation: prompts of any lengths in one batch, greedy or sampled, token by token."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from forge_models.decoder import Decoder
from forge_models.generation.cache import KVCache
from forge_models.generation.sampling import GREEDY, GenerationError, Sampler, Sampling
from forge_models.generation.text import NewText, texts_of
from forge_models.generation.text import before_stop as before_stop  # part of this module's interface

NONE: Mapping[str, Tensor] = MappingProxyType({})


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
        stop: text or texts at which a row stops, in the text that new tokens add to the prompt (`generation.text.NewText`); the
            token that completes one is the row's last. See `generation.text.before_stop`.
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
    check(model, prompts, max_tokens, prefill)
    if inputs and prefill is not None:
        raise GenerationError(
            f"prefill {prefill} takes a prompt in portions, and {', '.join(sorted(inputs))} come whole; leave it out"
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
    inputs: Mapping[str, Tensor] = NONE,
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


def check(model: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int, prefill: int | None) -> None:
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
