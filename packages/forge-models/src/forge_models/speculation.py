"""Greedy speculative decoding: the MTP modules draft tokens, and the model verifies all drafts in one forward
(Leviathan et al., 2023, with the drafts of DeepSeek-V3, 2024, section 5.4.3).

A round starts with n known tokens of a row, the last of which no forward has read yet, and `depth` drafted tokens after them. One
forward over these depth + 1 tokens gives the most likely token after each; as long as a draft equals that token, the next
token is known too. A round therefore generates 1 to depth + 1 tokens, the same tokens as one forward per token, unless two logits
are equal up to rounding.

Slots of a cache are positions. Entries of rejected drafts come after the known tokens and are overwritten before they are read.
Module k reads t_(i+k) at position i, so after a round its last k positions have to run again with the accepted tokens; all
modules start `depth` positions early, which keeps them synchronized.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_core.protocols.model import RecurrentCore
from forge_models.blocks.cache import KVCache
from forge_models.decoder import Decoder
from forge_models.generation import GenerationError, check_request, ends_of, evaluating


@dataclass
class Tally:
    """Statistics of speculative decoding.

    Attributes:
        tokens: number of generated tokens of all rows.
        rounds: number of forwards of the model after the prompt, summed over running rows; tokens - rows without drafts.
        drafted: number of drafted tokens.
        accepted: number of drafted tokens that were correct and used.
    """

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass
class _Row:
    """One row: number of known tokens, generated tokens, and whether the row is still running."""

    known: int
    new: list[int]
    runs: bool = True


def speculate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    eos: int | Collection[int] | None = None,
    stop: str | Sequence[str] = (),
    decode: Callable[[list[int]], str] | None = None,
    prefill: int | None = None,
    tally: Tally | None = None,
) -> Iterator[list[list[int]]]:
    """Yields the new tokens of each row after each round, none once the row has stopped; otherwise like greedy
    `generation.stream`.

    Args:
        tally: statistics to add to.

    Raises:
        GenerationError: the model has no MTP modules, uses dynamic rope scaling or has recurrent layers, or an argument is
            invalid as for `stream`; raised at the call.
    """
    check_request(model, prompts, max_tokens, prefill)
    if model.mtp is None:
        raise GenerationError("speculation needs MTP modules; the model has no [model.mtp]")
    if model.cache_limit is not None:
        raise GenerationError("speculation does not support dynamic rope scaling; generate without it")
    if any(isinstance(getattr(module, "core", None), RecurrentCore) for module in model.modules()):
        raise GenerationError(
            "recurrent layers cannot drop rejected drafts, so speculation does not support them; generate without"
        )
    return _Rounds(model, [list(prompt) for prompt in prompts], max_tokens, prefill, Tally() if tally is None else tally).run(
        ends_of(prompts, eos, stop, decode)
    )


class _Rounds:
    def __init__(self, model: Decoder, prompts: list[list[int]], max_tokens: int, prefill: int | None, tally: Tally) -> None:
        assert model.mtp is not None
        self.model, self.max_tokens, self.tally = model, max_tokens, tally
        self.names = list(model.mtp.depths)
        self.device = next(model.parameters()).device
        self.depth, self.longest = len(self.names), max(len(prompt) for prompt in prompts)
        self.chunk = prefill or self.longest
        self.rows = [_Row(len(prompt), []) for prompt in prompts]
        count, room = len(prompts), self.longest + max_tokens + 2 * self.depth
        self.tokens = torch.zeros(count, room + self.depth, dtype=torch.int64, device=self.device)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.tensor(prompt, device=self.device)
        self.cache = model.new_cache(count, room)
        self.caches = {name: KVCache([name], count, room, self.device) for name in self.names}
        self.streams: Tensor | None = None
        self.room = room

    def run(self, ends: Callable[[int, list[int]], bool]) -> Iterator[list[list[int]]]:
        """Yields the tokens of each round until every row has stopped."""
        found = [[token] for token in self._prompts()]
        while True:
            made = [self._taken(index, tokens, ends) for index, tokens in enumerate(found)]
            yield made
            if not any(row.runs for row in self.rows):
                return
            with torch.no_grad(), evaluating(self.model), torch.compiler.set_stance("force_eager"):
                before = [row.known for row in self.rows]
                for number, (row, tokens) in enumerate(zip(self.rows, made, strict=True)):
                    if tokens:
                        self.tokens[number, row.known : row.known + len(tokens)] = torch.tensor(tokens, device=self.device)
                        row.known += len(tokens)
                self._draft(before)
                found = self._verified()

    def _taken(self, index: int, found: list[int], ends: Callable[[int, list[int]], bool]) -> list[int]:
        """Appends the tokens of `found` up to the end of the row, and returns those appended."""
        row, taken = self.rows[index], list[int]()
        for token in found if row.runs else ():
            row.new.append(token)
            taken.append(token)
            if ends(index, row.new) or len(row.new) == self.max_tokens:
                row.runs = False
                break
        self.tally.tokens += len(taken)
        self.tally.accepted += min(len(taken), len(found) - 1)  # the token after the last accepted draft is not a draft
        return taken

    def _prompts(self) -> list[int]:
        """Runs the prompts through the model and the MTP modules; returns the most likely next token of each."""
        lengths = torch.tensor([row.known for row in self.rows], device=self.device)
        best = torch.zeros_like(lengths)
        with torch.no_grad(), evaluating(self.model), torch.compiler.set_stance("force_eager"):
            for start in range(0, self.longest, self.chunk):
                stop = min(start + self.chunk, self.longest)
                x = self._streamed(self.tokens[:, start:stop], None)
                at = lengths - 1 - start
                here = (at >= 0) & (at < stop - start)
                best = torch.where(here, self._best(x, at.clamp(0, stop - start - 1)[:, None])[:, 0], best)
                for k, name in enumerate(self.names, 1):
                    x, _ = self.model.draft(name, x, self.tokens[:, start + k : stop + k], self.caches[name])
        return best.tolist()

    def _draft(self, before: list[int]) -> None:
        """Writes the drafts of each row after its known tokens; `before` has the numbers of known tokens before this round."""
        starts = [max(0, known - self.depth) for known in before]
        places = torch.tensor(starts, device=self.device)[:, None] + torch.arange(2 * self.depth, device=self.device)
        known = torch.tensor([row.known for row in self.rows], device=self.device)[:, None]
        # The last position whose next token is known; a stopped row may have none among these positions.
        last = (known - 2 - places[:, :1]).clamp(min=0)
        assert self.streams is not None
        x = self.streams.gather(1, places.unsqueeze(2).expand(-1, -1, self.streams.shape[2]))
        for k, name in enumerate(self.names, 1):
            self.caches[name].rewind(max(starts))
            x, hidden = self.model.draft(name, x, self.tokens.gather(1, places + k), self.caches[name], places)
            self.tokens.scatter_(1, known + k - 1, self._most_likely(hidden, last))

    def _verified(self) -> list[list[int]]:
        """Returns the next tokens of each row: the accepted drafts and the model's token after them."""
        known = torch.tensor([row.known for row in self.rows], device=self.device)[:, None]
        places = known - 1 + torch.arange(self.depth + 1, device=self.device)
        self.cache.rewind(max(row.known for row in self.rows) - 1)
        given = self.tokens.gather(1, places)
        x = self._streamed(given, places)
        best = self._best(x, (places - places[:, :1]))
        right = (given[:, 1:] == best[:, :-1]).long().cumprod(1).sum(1).tolist()
        running = sum(row.runs for row in self.rows)
        self.tally.rounds += running
        self.tally.drafted += running * self.depth
        return [row[: count + 1] for row, count in zip(best.tolist(), right, strict=True)]

    def _streamed(self, tokens: Tensor, places: Tensor | None) -> Tensor:
        """Returns the model's residual stream for some tokens, and stores it at their positions."""
        first = self.cache.extent
        x = self.model.hidden_states(tokens, self.cache, places)
        if self.streams is None:
            self.streams = x.new_zeros(x.shape[0], self.room, x.shape[2])
        if places is None:
            self.streams[:, first : first + x.shape[1]] = x
        else:
            self.streams.scatter_(1, places.unsqueeze(2).expand_as(x), x)
        return x

    def _best(self, x: Tensor, columns: Tensor) -> Tensor:
        """Returns the most likely next token (B, n) at some columns (B, n) of the model's residual stream."""
        assert self.model.norm is not None
        return self._most_likely(self.model.norm(x), columns)

    def _most_likely(self, hidden: Tensor, columns: Tensor) -> Tensor:
        assert self.model.head is not None
        chosen = hidden.gather(1, columns.unsqueeze(2).expand(-1, -1, hidden.shape[2]))
        logits = self.model.head(chosen)
        assert isinstance(logits, Tensor)
        return logits.argmax(-1)
