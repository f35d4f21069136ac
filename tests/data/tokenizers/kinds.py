"""Small tokenizers of the kinds that published models have, made with the `tokenizers` library."""

import json
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "The cat sat on the mat and the dog ran to the park.",
    "user asks what the answer is and assistant says that it is forty two",
    "system: you are a helpful assistant.\nUser: Größe, naïve 日本語 👩‍🚀\n",
    "def read(self):\n    return self.value\n",
] * 20
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTROLS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>", "[INST]", "[/INST]")


def byte_level(specials: tuple[str, ...] = CONTROLS) -> Tokenizer:
    """As GPT-2 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=380, initial_alphabet=_bytes(), show_progress=False), specials)


def split_bytes(specials: tuple[str, ...] = CONTROLS) -> Tokenizer:
    """As Llama 3: a pattern of its own, whole words before merges, and a BOS by template."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(GPT2), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=380, initial_alphabet=_bytes(), show_progress=False)
    return with_bos(_trained(tokenizer, trainer, specials))


def llama2(specials: tuple[str, ...] = CONTROLS) -> Tokenizer:
    """As Llama 2 in its older form: a space before each text, also behind a control token; bytes for unknown characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # type: ignore[assignment]
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(strip)  # type: ignore[assignment]
    return with_bos(_with_fallback(tokenizer, specials))


def metaspace_first(specials: tuple[str, ...] = CONTROLS) -> Tokenizer:
    """As Llama 2 in its newer form and Mistral: a space before the first text only."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(strip)  # type: ignore[assignment]
    return with_bos(_with_fallback(tokenizer, specials))


def unigram(specials: tuple[str, ...] = CONTROLS) -> Tokenizer:
    """As T5: its model has the control tokens as pieces, so ordinary text could become them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")  # type: ignore[assignment]
    trainer = trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", show_progress=False)
    return _trained(tokenizer, trainer, specials)


def word_piece(specials: tuple[str, ...] = CONTROLS) -> Tokenizer:
    """As BERT: lower case, unknown words, and control tokens at both ends."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece()  # type: ignore[assignment]
    made = _trained(tokenizer, trainers.WordPieceTrainer(vocab_size=200, show_progress=False), specials)
    return with_bos(made, "<s> $A </s>")


def flagged(specials: tuple[str, ...] = CONTROLS) -> Tokenizer:
    """As Phi-3: control tokens that take in white space or stand only as words, and added tokens that are no control tokens."""
    tokenizer = metaspace_first(specials)
    tokenizer.add_special_tokens(
        [
            AddedToken("<|left|>", lstrip=True, normalized=False),
            AddedToken("<|right|>", rstrip=True, normalized=False),
            AddedToken("STOP", single_word=True, normalized=False),
            AddedToken("<|norm|>", normalized=True),
        ]
    )
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("    ", normalized=False)])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    made.__name__: made for made in (byte_level, split_bytes, llama2, metaspace_first, unigram, word_piece, flagged)
}


def with_bos(tokenizer: Tokenizer, template: str = "<s> $A") -> Tokenizer:
    """The tokenizer, with this template of what stands around a text."""
    tokens = [(token, tokenizer.token_to_id(token)) for token in template.split() if token != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)  # type: ignore[assignment]
    return tokenizer


def content(tokenizer: Tokenizer) -> bytes:
    """The `tokenizer.json`."""
    return tokenizer.to_str().encode("utf-8")


def fast(tokenizer: Tokenizer, **settings: Any) -> Any:
    """The tokenizer in transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def _bytes() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _trained(tokenizer: Tokenizer, trainer: Any, specials: tuple[str, ...]) -> Tokenizer:
    trainer.special_tokens = [AddedToken(each, special=True) for each in specials]
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def _with_fallback(tokenizer: Tokenizer, specials: tuple[str, ...]) -> Tokenizer:
    """Trains with all bytes as pieces, which are no added tokens."""
    pieces = tuple(f"<0x{value:02X}>" for value in range(256))
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False)
    parsed = json.loads(_trained(tokenizer, trainer, (*specials, *pieces)).to_str())
    parsed["added_tokens"] = [token for token in parsed["added_tokens"] if token["content"] in specials]
    return Tokenizer.from_str(json.dumps(parsed))
