"""A vision-language model that answers questions with images and clips, in any layout that its fusion supports."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from forge_core.errors import DataError, ForgeError
from forge_core.protocols.data import Tokenizer
from forge_core.protocols.weights import Weights
from forge_core.registry import Registry
from forge_data.chat.conversation import Chat, Turn
from forge_parallel.launch import process_group
from forge_parallel.launch.environment import Launch, read_launcher
from forge_parallel.model.parallel_model import ParallelModel
from forge_train.inference.answers import AnswerModel, AnswerPrompt, GenerationSettings, ScoredAnswer
from forge_train.inference.stored import load_sharded_model, open_weights, recipe_to_generate
from forge_train.inference.tokenizer import chat_for, check_tokenizer, ends_of_texts, tokenizer_for
from forge_train.process.ranks import content_of
from forge_vlm.data.documents import BrokenRecord
from forge_vlm.data.prompts import image_inputs
from forge_vlm.data.question_prompts import QuestionEncoder, clip_settings

Made = TypeVar("Made")


@dataclass(frozen=True)
class VisualRequest:
    """A question for a model.

    Attributes:
        place: where the question is from, for messages.
        turns: makes the turns and the function that reads the images which they name; called when the batch comes.
        answer: the answer to score; unused to generate one.
    """

    place: str
    turns: Callable[[], tuple[Sequence[Turn], Callable[[str], bytes]]]
    answer: str = ""


class VisualAnswerModel:
    """Scores and generates answers to questions with images. Questions are formatted with the chat template of the model, and
    their images cut into tiles, as in training.

    Attributes:
        frames: maximum number of frames of a clip.
        told: whether the time is written before each frame.
    """

    def __init__(
        self,
        model: ParallelModel,
        weights: Weights,
        tokenizer: Tokenizer,
        chat: Chat,
        *,
        option: str,
        batch: int = 8,
        frames: int | None = None,
    ) -> None:
        """
        Args:
            model: the model with its weights.
            weights: the stored weights, whose recipe says how images are prepared.
            tokenizer: the tokenizer of the model.
            chat: the chat template of the model.
            option: what needs images, for messages.
            batch: rows per forward and rank.
            frames: maximum number of frames of a clip; None: as the run's sources of clips say, else 8.

        Raises:
            DataError: the model has no image inputs.
            ForgeError: the layout cuts sequences or layers, through which images cannot be given.
        """
        layout = model.topology.layout
        if layout.pp > 1 or layout.cp > 1:
            raise ForgeError(
                f"{option}: images cannot be given to a model in layout {layout}; set parallel.pp = 1 and parallel.cp = 1"
            )
        self._encoder = QuestionEncoder(tokenizer, chat, image_inputs(weights, option))
        end = () if self._encoder.end_id is None else (self._encoder.end_id,)
        self.answers = AnswerModel(model, tokenizer, ends=(*ends_of_texts(weights, tokenizer), *end), batch=batch)
        of_run, self.told = clip_settings(weights.facts.recipe)
        self.frames = of_run if frames is None else frames

    def likelihoods(self, requests: Sequence[VisualRequest]) -> list[tuple[float, bool]]:
        """Collective: returns for each request log p(answer and the end of its turn | question) in nats, and whether greedy
        decoding would generate both.

        Raises:
            DataError: a question cannot be encoded, or has more tokens than the model supports; the error names its place.
        """
        return self.answers.scores(requests, self._scored)

    def texts(self, requests: Sequence[VisualRequest], settings: GenerationSettings) -> list[str]:
        """Collective: returns the answers that the model generates, without the end of the turn.

        Raises:
            DataError: see `likelihoods`.
            ForgeError: a question leaves no room for an answer.
        """
        end = self._encoder.end_text
        until = (*settings.until, *((end,) if end and end not in settings.until else ()))
        return self.answers.texts(requests, self._prompt, replace(settings, until=until))

    def _prompt(self, request: VisualRequest) -> AnswerPrompt:
        prompt = _at(request, lambda: self._encoder.prompt(*request.turns()))
        return AnswerPrompt(prompt.ids, prompt.inputs)

    def _scored(self, request: VisualRequest) -> ScoredAnswer:
        def made() -> Any:
            turns, fetch = request.turns()
            return self._encoder.answered(turns, request.answer, fetch)

        found = _at(request, made)
        if len(found.ids) > self.answers.max_length + 1:
            raise DataError(
                f"{request.place} has {len(found.ids)} tokens with its images and answer, but model.max_length = "
                f"{self.answers.max_length}; leave the question out, or show fewer frames or tiles"
            )
        return ScoredAnswer(found.ids[:-1], found.ids[len(found.ids) - found.answer :], found.inputs)


def _at(request: VisualRequest, made: Callable[[], Made]) -> Made:
    """Returns what `made` does; a fault names the place of the question."""
    try:
        return made()
    except BrokenRecord as cause:
        raise DataError(f"{request.place} {cause}; correct the question, or leave it out") from cause
    except DataError as cause:
        raise DataError(f"{request.place}: {cause}") from cause


def open_visual_model(
    weights: Weights,
    overrides: Sequence[str],
    where: Launch,
    registry: Registry,
    note: Callable[[str], None],
    *,
    option: str,
    template: str | None = None,
    tokenizer: Path | None = None,
    frames: int | None = None,
    batch: int = 8,
) -> VisualAnswerModel:
    """Collective: loads weights with their tokenizer and chat template.

    Args:
        weights: the stored weights.
        overrides: `--parallel.key=value`; by default all ranks are data ranks.
        where: this process among the others.
        registry: where components are found.
        note: receives what the user should know.
        option: what needs images, for messages.
        template: chat template to use instead: a name, a file or a folder.
        tokenizer: a tokenizer.json or sentencepiece model to use instead.
        frames, batch: see `VisualAnswerModel`.

    Raises:
        ForgeError: the model has no image inputs, or there is no tokenizer or chat template.
    """
    inputs = image_inputs(weights, option)  # before the weights are loaded
    coder = tokenizer_for(weights, tokenizer, registry, note)
    check_tokenizer(coder, weights, note)
    chat = chat_for(weights, coder, template)
    if "data" not in weights.facts.recipe and inputs.native is None:
        note("these weights do not record how images are cut into tiles; each is shown as one tile")
    recipe = recipe_to_generate(weights, overrides, where.size, registry)
    device = process_group.init_process_groups(where, recipe.job.parallel.timeout, content=lambda: content_of(recipe, registry))
    model = load_sharded_model(weights, recipe, device, registry)
    return VisualAnswerModel(model, weights, coder, chat, option=option, batch=batch, frames=frames)


def open_alone(
    checkpoint: str,
    weights: str = "model",
    template: str | None = None,
    tokenizer: str | None = None,
    frames: int | None = None,
    batch: int = 8,
) -> VisualAnswerModel:
    """Returns the model of a checkpoint on this process alone; see `open_visual_model`."""
    registry = Registry()
    opened = open_weights(checkpoint, registry, weights)
    path = None if tokenizer is None else Path(tokenizer)
    return open_visual_model(
        opened,
        (),
        read_launcher(os.environ),
        registry,
        lambda _: None,
        option="lmms-eval",
        template=template,
        tokenizer=path,
        frames=None if frames is None else int(frames),
        batch=batch,
    )
