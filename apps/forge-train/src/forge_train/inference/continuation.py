"""Continues a text with a model, token by token."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from forge_core.errors import ForgeError
from forge_core.protocols.data import Tokenizer
from forge_models.generation import Sampling
from forge_models.speculation import Tally

if TYPE_CHECKING:
    from forge_data.chat.conversation import Chat, Turn
    from forge_vlm.data.prompts import Prompts

    Prompt = tuple[list[int], list[int], Mapping[str, torch.Tensor]]
    """Token ids, the ids that are text, and other inputs of the model; see `forge_vlm.data.prompts.Prompt`."""


class Continuation:
    """Continues a text piece by piece.

    With a chat template, the text is a user turn and the continuation is the answer. `illustrated` builds prompts with images,
    and has the template, too.

    Bytes of an incomplete character and possible beginnings of a stop string are held back until they are complete or ruled out.
    If the model is sharded over several ranks, every rank continues the same texts, and `agree` makes all ranks use the same
    tokens.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Tokenizer,
        sampling: Sampling,
        *,
        max_tokens: int,
        stops: Sequence[str] = (),
        ends: frozenset[int] = frozenset(),
        prefill: int | None = None,
        speculate: bool = False,
        agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
        chat: "Chat | None" = None,
        illustrated: "Prompts | None" = None,
    ) -> None:
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self.max_tokens, self.prefill, self.agree = max_tokens, prefill, agree
        self.stops, self.ends = tuple(stops), ends
        self.chat, self._illustrated = chat, illustrated
        self.tokens = 0
        self.drafts = Tally() if speculate else None
        if speculate and (sampling.temperature != 0 or sampling.repetition_penalty != 1):
            raise ForgeError("--speculate needs greedy decoding; add --temperature 0 and remove --repetition-penalty")
        if any(not text for text in self.stops):
            raise ForgeError("--stop must not be empty")

    def __call__(self, text: str, before: "Sequence[Turn]" = ()) -> Iterator[str]:
        """Yields the continuation of `text` in pieces; `before` are earlier turns of the chat."""
        from forge_models.generation import NewText, StreamedText

        (prompt, words, inputs), new = self._shown(text, before), list[int]()
        pieces = StreamedText(NewText(self.tokenizer.decode, words), self.stops, self._broken)
        self.tokens = 0
        for token in self._new(prompt, *([inputs] if inputs else [])):
            self.tokens += 1
            if token in self.ends:
                break
            new.append(token)
            if piece := pieces.add(new):
                yield piece
            if pieces.stopped:
                return
        if piece := pieces.rest(new):
            yield piece

    def together(self, texts: Sequence[str]) -> list[str]:
        """Returns the continuations of several texts, generated in one batch."""
        from forge_models.generation import NewText, before_stop, generate

        model: Any = self.model
        prompts = [self._prompt(text) for text in texts]
        rows = generate(
            model,
            prompts,
            self.sampling,
            max_tokens=self.max_tokens,
            eos=self.ends,
            stop=self.stops,
            decode=self.tokenizer.decode,
            prefill=self.prefill,
            agree=self.agree,
        )
        self.tokens = sum(map(len, rows))
        kept = [row[:-1] if row and row[-1] in self.ends else row for row in rows]
        added = [NewText(self.tokenizer.decode, prompt)(row) for prompt, row in zip(prompts, kept, strict=True)]
        return [before_stop(text, self.stops) for text in added]

    def _prompt(self, text: str) -> list[int]:
        return self._shown(text)[0]

    def _shown(self, text: str, before: "Sequence[Turn]" = ()) -> "Prompt":
        if self.chat is not None:
            from forge_data.chat.conversation import Turn
            from forge_vlm.data.prompts import Prompts

            made = self._illustrated or Prompts(self.tokenizer, self.chat)
            return made.conversation([*before, Turn("user", text)])
        if self._illustrated is not None:
            return self._illustrated.text(text)
        ids = [*self.tokenizer.prefix, *map(int, self.tokenizer.encode(text))]
        if not ids and self.tokenizer.eos is not None:
            ids = [self.tokenizer.eos]  # in training, a document follows the end of another one
        return ids, ids, {}

    def _new(self, prompt: list[int], inputs: Mapping[str, torch.Tensor] | None = None) -> Iterator[int]:
        """Yields the tokens generated after a prompt."""
        from forge_models.generation import stream
        from forge_models.speculation import speculate

        model: Any = self.model
        limits: dict[str, Any] = {"max_tokens": self.max_tokens, "eos": self.ends, "prefill": self.prefill}
        if self.drafts is not None:
            for made in speculate(model, [prompt], tally=self.drafts, **limits):
                yield from made[0]
            return
        if inputs:
            device = next(model.parameters()).device
            limits["inputs"] = {name: value.to(device) for name, value in inputs.items()}
        for step in stream(model, [prompt], self.sampling, agree=self.agree, **limits):
            if step[0] is None:
                return
            yield step[0]

    @cached_property
    def _broken(self) -> int | None:
        from forge_models.generation import broken_id

        return broken_id(self.tokenizer.decode, self.tokenizer.vocab_size)
