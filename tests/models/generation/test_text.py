"""The text of new tokens behind a prompt, against whole texts decoded by the tokenizers library and by sentencepiece."""

import io
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from forge_models.generation import NewText, StreamedText, broken_id

TEXT = ["The cat sat on the mat.\n\nShe went to the park.", "for x in y:\n    return x", "größe, 猫 и 🙂\n🙂 été"] * 20


def byte_level() -> Tokenizer:
    """As GPT-2 and Llama 3: every byte has a token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    train = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXT, train)
    return backend


def byte_fallback() -> Tokenizer:
    """As Llama 2: `▁` stands for a space, the decoder strips the first one, unknown characters are bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # type: ignore[assignment]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)  # type: ignore[assignment]
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{value:02X}>" for value in range(256)]
    limit = sorted({letter for text in TEXT for letter in text if letter < "z"})
    train = trainers.BpeTrainer(vocab_size=320, special_tokens=specials, limit_alphabet=len(limit) - 2, show_progress=False)
    backend.train_from_iterator([text.replace("🙂", "") for text in TEXT], train)
    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in ("<unk>", "<s>", "</s>")]
    return Tokenizer.from_str(json.dumps(content))


def pieces_model() -> Any:
    model = io.BytesIO()
    options = {"vocab_size": 340, "model_type": "bpe", "byte_fallback": True, "character_coverage": 0.99, "minloglevel": 2}
    options |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT), model_writer=model, **options)
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


Coder = tuple[Callable[[str], list[int]], Callable[[list[int]], str], int]


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "sentencepiece"])
def coder(request: pytest.FixtureRequest) -> Coder:
    """Encoder, decoder and size of the vocabulary."""
    if request.param == "sentencepiece":
        model = pieces_model()
        return model.encode, model.decode, model.get_piece_size()
    backend = byte_level() if request.param == "byte_level" else byte_fallback()
    return lambda text: backend.encode(text, add_special_tokens=False).ids, backend.decode, backend.get_vocab_size()


def shown(text: NewText, new: list[int], broken: int | None, stops: tuple[str, ...] = ()) -> str:
    """What is shown piece by piece."""
    pieces = StreamedText(text, stops, broken)
    told = []
    for size in range(1, len(new) + 1):
        told.append(pieces.add(new[:size]))
        if pieces.stopped:
            return "".join(told)
    return "".join([*told, pieces.rest(new)])


def test_trials_a6_new_text_begins_with_the_space_of_its_first_word(coder: Coder) -> None:
    encode, decode, _ = coder
    prompt = encode("She went to the")
    whole = encode("She went to the park.")
    assert whole[: len(prompt)] == prompt and decode(whole) == "She went to the park."
    assert NewText(decode, prompt)(whole[len(prompt) :]) == " park."
    pieces = StreamedText(NewText(decode, prompt), (" park",), None)
    assert pieces.add(whole[len(prompt) :]) == "" and pieces.stopped


def test_trials_a6_without_a_prompt_the_text_begins_as_a_text_does(coder: Coder) -> None:
    encode, decode, _ = coder
    assert NewText(decode, [])(encode("the park")) == "the park"


def test_trials_a6_pieces_are_the_whole_text(coder: Coder) -> None:
    """Random tokens, among them halves of characters, behind prompts of many lengths; by the whole text of the library."""
    encode, decode, size = coder
    broken = broken_id(decode, size)
    assert broken is not None and decode([broken]) == "\ufffd"
    draw = random.Random(3)
    letters = encode("🙂\n🙂 é猫a")
    for round_ in range(60):
        prompt = encode("The cat sat on the mat. " * draw.choice([1, 1, 30]))[: draw.randrange(1, 200)]
        new = [draw.choice(letters) if round_ % 2 else draw.randrange(size) for _ in range(draw.randrange(1, 24))]
        before, whole = decode(prompt), decode(prompt + new)
        if not whole.startswith(before):
            continue  # the first new tokens are the rest of a sequence of bytes of the prompt
        assert NewText(decode, prompt)(new) == whole[len(before) :]
        assert shown(NewText(decode, prompt), new, broken) == whole[len(before) :]


def test_trials_a6_a_stop_text_ends_the_pieces_where_it_ends_the_whole(coder: Coder) -> None:
    encode, decode, size = coder
    broken = broken_id(decode, size)
    prompt, text = "She went to the", " park. 🙂🙂\n\nThe mat and a mat"
    whole, start = encode(prompt + text), encode(prompt)
    assert whole[: len(start)] == start
    new = whole[len(start) :]
    for stops in ((" park",), ("🙂\n",), ("\n\nThe", "mat"), ("never", "t and"), ("k. 🙂🙂\n\nThe ma",), ("mats",)):
        cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))
        assert shown(NewText(decode, start), new, broken, stops) == text[:cut]


def test_trials_a6_control_tokens_before_new_text_are_not_the_beginning_of_a_text() -> None:
    """A prompt may end in more control tokens than are looked at first; they have no text."""
    backend = byte_fallback()
    words = backend.encode("She went", add_special_tokens=False).ids
    prompt = words + [backend.token_to_id("</s>")] * 100
    new = backend.encode("to the", add_special_tokens=False).ids
    assert backend.decode(prompt + new) == "She went to the"
    assert NewText(backend.decode, prompt)(new) == " to the"


def test_a_tokenizer_without_bytes_has_no_broken_id() -> None:
    assert broken_id(lambda ids: "".join("ab"[index] for index in ids), 2) is None
