"""A model and its tokenizer taken from a checkpoint, on one process, for generation."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from forge_core.errors import DataError, ForgeError
from forge_core.protocols.convert import Weights
from forge_core.protocols.data import Tokenizer
from forge_core.registry import Registry
from forge_models.generation.sampling import Sampling
from forge_models.generation.speculation import Tally
from forge_train.inference.forge_weights import ForgeWeights, job_of

FOREIGN = "config.json"
SENTENCEPIECE = ".model"


def opened(path: Path, registry: Registry) -> Weights:
    """The weights at `path`: of a run, a checkpoint, or a folder in the Hugging Face format.

    Raises:
        ForgeError: there is nothing of that kind; see the converters.
    """
    kind = "hf" if (path / FOREIGN).is_file() else "forge"
    return registry.load("forge.converters", kind)().build().read(path)


@torch.no_grad()
def loaded(weights: Weights, device: torch.device | None = None) -> torch.nn.Module:
    """The whole model in the widest dtype among its weights, ready to run."""
    from forge_models.hf.streamed_forward import buffers_of

    component: Any = weights.model
    place = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        model = component.build()
    held = dict(model.named_buffers())  # they keep the dtypes that they have
    dtype = torch.float32
    if weights.tensors:
        dtypes = [getattr(torch, entry.dtype) for name, entry in weights.tensors.items() if name not in held]
        dtype = dtypes[0]
        for other in dtypes[1:]:
            dtype = torch.promote_types(dtype, other)
    state = {name: value.to(place, copy=True) for name, value in buffers_of(weights, model, held).items()}
    ties = dict(model.specs().ties)
    for name in dict(model.named_parameters(remove_duplicate=False)):
        original = ties.get(name, name)
        if original not in state:
            state[original] = weights.read([original])[original].to(device=place, dtype=dtype, copy=True)
        state[name] = state[original]
    model.load_state_dict(state, assign=True)
    return model.eval()


def tokenizer_for(weights: Weights, path: Path | None, registry: Registry, report: Callable[[str], None]) -> Tokenizer:
    """The tokenizer that belongs to some weights: a given file, the run's prepared data, or the folder beside them.

    Raises:
        ForgeError: there is none; says how to give one.
    """
    from forge_data.loading.open_sources import context_of, open_sources

    if path is None and weights.facts.tokenizer is not None:
        path = weights.facts.tokenizer / "tokenizer.json"
        if not path.is_file():
            raise DataError(f"{path.parent} has no tokenizer.json; give one with --tokenizer")
    if path is not None:
        return _read(path, weights)
    if isinstance(weights, ForgeWeights) and weights.place.run is not None:
        job = job_of(weights.meta, registry, "data")
        context = context_of(job.data, weights.place.run / "data", report)
        found = context.tokenizer or open_sources(job.data, context, None).tokenizer
        if found is not None:
            return found
    raise DataError(f"nothing says how {weights.facts.origin} writes text; give a tokenizer.json with --tokenizer")


def fits(tokenizer: Tokenizer, weights: Weights, report: Callable[[str], None]) -> None:
    """Compares the ids of a tokenizer with a model's; reports rows without an id.

    Raises:
        DataError: the tokenizer has ids that the model lacks.
    """
    ids, rows = tokenizer.vocab_size, getattr(weights.model, "vocab_size", tokenizer.vocab_size)
    if ids > rows:
        raise DataError(f"the tokenizer has {ids} ids, {weights.facts.origin} {rows}; give the right one with --tokenizer")
    if ids < rows:
        report(f"the tokenizer has {ids} ids; the last {rows - ids} of the model's {rows} are padding")


def _read(path: Path, weights: Weights) -> Tokenizer:
    """A `tokenizer.json`, of the tokenizers library or as a store carries it, or a `.model` of sentencepiece."""
    from forge_data.tokenizers.restore import restore
    from forge_data.tokenizers.sentencepiece import SentencePieceTokenizer

    try:
        content = path.read_bytes()
    except OSError as cause:
        raise DataError(f"tokenizer {path} cannot be read: {cause.strerror}") from cause
    if path.suffix == SENTENCEPIECE:
        ids = weights.facts.special_tokens.get("eos_token_id")
        return SentencePieceTokenizer(content, ids if isinstance(ids, int) else None, str(path))
    return restore(content, _end(content, path, weights), str(path))


def kept_tokenizer(weights: Weights, folder: Path, registry: Registry) -> bool:
    """Writes the tokenizer of a run's data into `folder`, in the files of the tokenizers library.

    Returns whether there is one: other weights bring their own files, and bytes as tokens have no such file.
    """
    if weights.facts.tokenizer is not None or not isinstance(weights, ForgeWeights) or weights.place.run is None:
        return False
    try:
        tokenizer = tokenizer_for(weights, None, registry, lambda _: None)
    except DataError:
        return False  # the run's data are elsewhere by now, or it was trained on numbers
    content = json.loads(tokenizer.dump())
    if "model" not in content:
        return False
    texts = {entry["id"]: entry["content"] for entry in content.get("added_tokens", [])}
    (folder / "tokenizer.json").write_bytes(tokenizer.dump())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | (
        {"eos_token": texts[tokenizer.eos]} if tokenizer.eos in texts else {}
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return True


def opening(weights: Weights, path: Path | None = None) -> list[int]:
    """Special tokens that a text begins with, as the `tokenizer.json` beside imported weights says; none for our own runs.

    A model of sentencepiece does not say; there the `tokenizer_config.json` beside it does, if there is one.
    """
    if path is None:
        if weights.facts.tokenizer is None:
            return []
        path = weights.facts.tokenizer / "tokenizer.json"
    if path.suffix == SENTENCEPIECE:
        settings = path.with_name("tokenizer_config.json")
        first = weights.facts.special_tokens.get("bos_token_id")
        wanted = settings.is_file() and json.loads(settings.read_text(encoding="utf-8")).get("add_bos_token")
        return [first] if wanted and isinstance(first, int) else []
    try:
        processor = json.loads(path.read_text(encoding="utf-8")).get("post_processor") or {}
    except (OSError, ValueError, AttributeError) as cause:
        raise DataError(f"{path} is no tokenizer.json: {cause}") from cause
    found: list[int] = []
    for step in processor.get("processors", [processor]):
        if step.get("type") != "TemplateProcessing":
            continue
        for entry in step["single"]:
            if "SpecialToken" not in entry:
                break
            found += step["special_tokens"][entry["SpecialToken"]["id"]]["ids"]
    return found


def _end(content: bytes, path: Path, weights: Weights) -> int | None:
    """Id of the token that ends a document in a `tokenizer.json` of the tokenizers library; our own files say it themselves."""
    try:
        parsed = json.loads(content)
        added = parsed.get("added_tokens", [])
    except (ValueError, AttributeError) as cause:
        raise DataError(f"{path} is no tokenizer.json: {cause}") from cause
    if "model" not in parsed or "type" in parsed:
        return None
    texts = {entry["id"]: entry["content"] for entry in added}
    ids = weights.facts.special_tokens.get("eos_token_id")
    for wanted in ids if isinstance(ids, list) else [ids]:
        if wanted in texts:
            return wanted
    for text in ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"):
        for index, own in texts.items():
            if own == text:
                return index
    raise DataError(f"{path} has no token that is known to end a text; the checkpoint should say eos_token_id")


class Continuation:
    """Continues a text, piece by piece; what cannot be shown yet is held back.

    Bytes of an unfinished character and beginnings of a stop string stay inside until they are decided.
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
        begin: Sequence[int] = (),
        prefill: int | None = None,
        speculate: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self.max_tokens, self.prefill = max_tokens, prefill
        self.stops, self.ends, self.begin = tuple(stops), ends, list(begin)
        self.tokens = 0
        self.drafts = Tally() if speculate else None
        if speculate and (sampling.temperature != 0 or sampling.repetition_penalty != 1):
            raise ForgeError("--speculate makes the most likely tokens; add --temperature 0, and leave out --repetition-penalty")
        if any(not text for text in self.stops):
            raise ForgeError("--stop takes a text that is not empty")

    def __call__(self, text: str) -> Iterator[str]:
        """The continuation of `text` in pieces."""
        prompt = self.begin + [int(token) for token in self.tokenizer.encode(text)]
        if not prompt and self.tokenizer.eos is not None:
            prompt = [self.tokenizer.eos]  # documents follow the end of another
        self.tokens, shown, made = 0, 0, []
        for token in self._new(prompt):
            self.tokens += 1
            if token in self.ends:
                break
            made.append(token)
            whole = self.tokenizer.decode(made)
            cut = min((at for stop in self.stops if (at := whole.find(stop)) >= 0), default=-1)
            if cut >= 0:
                yield whole[shown:cut]
                return
            ready = self._decided(whole)
            if ready > shown:
                yield whole[shown:ready]
                shown = ready
        yield self.tokenizer.decode(made)[shown:]

    def _new(self, prompt: list[int]) -> Iterator[int]:
        """The tokens behind a prompt."""
        from forge_models.generation.generate import stream
        from forge_models.generation.speculation import speculate

        model: Any = self.model
        limits: dict[str, Any] = {"max_tokens": self.max_tokens, "eos": self.ends, "prefill": self.prefill}
        if self.drafts is not None:
            for made in speculate(model, [prompt], tally=self.drafts, **limits):
                yield from made[0]
            return
        for step in stream(model, [prompt], self.sampling, **limits):
            if step[0] is None:
                return
            yield step[0]

    def _decided(self, whole: str) -> int:
        """How much of a text no further token can change or cut off."""
        end = len(whole.rstrip("\ufffd"))
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(whole)), 0, -1):
                if whole.endswith(stop[:size]):
                    end = min(end, len(whole) - size)
                    break
        return end
