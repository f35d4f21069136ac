"""Tokenizers in GGUF files: transformers reads the same ids for the same texts; what the format cannot describe is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from forge_core.protocols.weights import WeightsInfo
from forge_models.gguf.converter import GgufConverter
from forge_models.gguf.tokenizer import REST, WORDS, tokenizer_metadata
from forge_models.hf.config import Unsupported
from forge_models.hf.reader import Folder
from models.hf.command_line import with_tokenizer
from models.hf.zoo import CASES, random_model, saved

gguf = pytest.importorskip("gguf")

TEXTS = [
    "Hello world, it's 2024 now!",
    "don't  stop\n\n x\ty 12345",
    "naïve café ☕ 你好",
    "<|user|>hi <think>so</think><|end|>",
    "",
]
CORPUS = ["Hello world it's the year 2024 and the world says hello hello to 12345 naïve cafés", "don't stop now, 你好 你好"] * 4
QWEN2 = rf"{WORDS}\p{{N}}{REST}"
LLAMA3 = rf"{WORDS}\p{{N}}{{1,3}}{REST}"
INFO = WeightsInfo(special_tokens={"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None})


def trained(before: Any, folder: Path, whole: bool = False, **settings: Any) -> Path:
    """A byte-level BPE with merges and added tokens."""
    backend = Tokenizer(models.BPE(ignore_merges=whole))
    backend.pre_tokenizer = before
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|begin|>", "<|end|>", "<|user|>"])
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"} | settings)
    )
    return folder


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def changed(folder: Path, **keys: Any) -> Path:
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | keys))
    return folder


def written(folder: Path, tmp_path: Path, size: int = 320, **options: Any) -> Path:
    """A file of a tiny model with the tokenizer of `folder`."""
    keys = CASES["llama"][1] | {"vocab_size": size, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    weights = Folder(saved(random_model("llama", keys), tmp_path / "model"))
    GgufConverter(tokenizer=str(folder), **options).write(tmp_path / "m.gguf", weights)
    return tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("before", "whole", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), False, "gpt-2"),
        (split(QWEN2), False, "qwen2"),
        (split(LLAMA3), True, "llama-bpe"),
    ],
)
def test_transformers_reads_the_same_ids(before: Any, whole: bool, name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = trained(before, tmp_path / "tokenizer", whole, chat_template="{{ messages[0]['content'] }}")
    path = written(folder, tmp_path)
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert fields["tokenizer.ggml.pre"].contents() == name
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        assert theirs(text, add_special_tokens=False).input_ids == ours(text, add_special_tokens=False).input_ids, text
    assert theirs.eos_token == "<|end|>" and theirs.bos_token == "<|begin|>"
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_kinds_of_tokens(tmp_path: Path) -> None:
    folder = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), tmp_path / "tokenizer")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    count = backend.get_vocab_size()
    fields = gguf.GGUFReader(written(folder, tmp_path, count + 3)).fields
    tokens, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    assert tokens[:count] == [backend.id_to_token(index) for index in range(count)]
    assert tokens[count:] == [f"[PAD{index}]" for index in range(count, count + 3)]
    assert kinds == [3, 3, 3, *[1] * (count - 5), 4, 4, 5, 5, 5]
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    assert fields["tokenizer.ggml.merges"].contents() == [" ".join(pair) for pair in merges] != []
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("bos", "eos")}
    assert ids == {"bos": 0, "eos": 1}
    assert "tokenizer.ggml.padding_token_id" not in fields


def test_a_tokenizer_without_merges_has_an_empty_list_of_them(tmp_path: Path) -> None:
    path = tmp_path / "model"
    weights = Folder(with_tokenizer(saved(random_model(*CASES["llama"]), path)))
    GgufConverter().write(tmp_path / "m.gguf", weights)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.merges"].contents() == []
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 97
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    assert fields["tokenizer.ggml.add_eos_token"].contents() is False
    notes = GgufConverter().read(tmp_path / "m.gguf").facts.notes
    assert notes == ("the tokenizer in the file was not read; pass its folder with --tokenizer",)


def test_tokens_that_end_generation(tmp_path: Path) -> None:
    found = tokenizer_metadata(None, WeightsInfo(special_tokens={"eos_token_id": [5, 6]}, ends=(6, 7)), 10, None)
    assert found == {"tokenizer.ggml.model": "none"} | {
        f"tokenizer.ggml.{name}_token_id": index for name, index in (("eos", 5), ("eot", 6), ("eom", 7))
    }
    with pytest.raises(Unsupported, match="4 tokens end generation, but a GGUF file names 3 at most"):
        tokenizer_metadata(None, WeightsInfo(ends=(5, 6, 7, 8)), 10, None)


def test_templates(tmp_path: Path) -> None:
    folder = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), tmp_path)
    assert "tokenizer.chat_template" not in tokenizer_metadata(folder, INFO, 400, None)
    both = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": both}))
    assert tokenizer_metadata(folder, INFO, 400, None)["tokenizer.chat_template"] == "d"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": both[:1]}))
    with pytest.raises(Unsupported, match="chat templates tool, and none is the default"):
        tokenizer_metadata(folder, INFO, 400, None)
    (folder / "chat_template.jinja").write_text("j")
    assert tokenizer_metadata(folder, INFO, 400, None)["tokenizer.chat_template"] == "j"


BEGINS = processors.TemplateProcessing(single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)])
OTHER = processors.TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 2)])


def as_json(part: Any) -> Any:
    return json.loads(part.__getstate__())


def test_tokens_around_a_text(tmp_path: Path) -> None:
    folder = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), tmp_path, bos_token="<|begin|>")
    changed(folder, post_processor=as_json(BEGINS))
    found = tokenizer_metadata(folder, WeightsInfo(), 400, None)
    assert found["tokenizer.ggml.add_bos_token"] is True and found["tokenizer.ggml.add_eos_token"] is True
    changed(folder, post_processor=None)
    found = tokenizer_metadata(folder, INFO, 400, None)
    assert found["tokenizer.ggml.add_bos_token"] is False and found["tokenizer.ggml.add_eos_token"] is False


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(
    ("before", "keys", "reason"),
    [
        (split(r"\w+|\s+"), {}, "its way to split text into words"),
        (split(LLAMA3), {}, "pre-tokenizer llama-bpe with ignore_merges false"),
        (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), {}, "its way to split text into words"),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), {}, "add_prefix_space"),
        (BYTES, {"normalizer": as_json(normalizers.Lowercase())}, "the normalizer Lowercase"),
        (BYTES, {"post_processor": as_json(OTHER)}, r"adds tokens \[2\] before and \[\] after"),
        (BYTES, {"post_processor": {"type": "RobertaProcessing"}}, "the post-processor RobertaProcessing"),
        (BYTES, {"model": {"type": "WordPiece", "vocab": {}}}, "kind WordPiece"),
        (BYTES, {"model": {"type": "BPE", "byte_fallback": True, "vocab": {}, "merges": []}}, "bytes as a fallback"),
    ],
)
def test_a_tokenizer_that_the_format_cannot_describe_is_refused(
    before: Any, keys: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = changed(trained(before, tmp_path / "tokenizer"), **keys)
    with pytest.raises(Unsupported, match=reason) as refusal:
        tokenizer_metadata(folder, INFO, 400, None)
    assert "--pre-tokenizer none" in str(refusal.value)
    assert tokenizer_metadata(folder, INFO, 400, "none")["tokenizer.ggml.model"] == "none"


def test_the_name_of_the_rule_can_be_given(tmp_path: Path) -> None:
    folder = trained(split(r"\w+|\s+"), tmp_path)
    assert tokenizer_metadata(folder, INFO, 400, "tekken")["tokenizer.ggml.pre"] == "tekken"


def test_more_tokens_than_the_model_has_are_refused(tmp_path: Path) -> None:
    folder = trained(BYTES, tmp_path)
    with pytest.raises(Unsupported, match=r"has the id \d+, but the model has 290 tokens"):
        tokenizer_metadata(folder, INFO, 290, None)
    with pytest.raises(Unsupported, match=r"neither tokenizer.json nor tokenizer.model"):
        tokenizer_metadata(tmp_path / "nowhere", INFO, 290, None)


def sentences(folder: Path, **options: Any) -> Any:
    """A tokenizer of sentencepiece, and its folder."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder.mkdir(exist_ok=True)
    settings = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False} | options
    (folder / "corpus.txt").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "tokenizer"), vocab_size=320, byte_fallback=True,
        user_defined_symbols=["<|user|>"], control_symbols=["<|x|>"], minloglevel=2, hard_vocab_limit=False, **settings,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    library = sentences(tmp_path, add_dummy_prefix=prefix)
    count = library.vocab_size()
    found = tokenizer_metadata(tmp_path, INFO, count + 2, None)
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.tokens"] == [
        *map(library.id_to_piece, range(count)), f"[PAD{count}]", f"[PAD{count + 1}]"
    ]  # fmt: skip
    assert found["tokenizer.ggml.scores"][:count] == pytest.approx([*map(library.get_score, range(count))])
    kinds = found["tokenizer.ggml.token_type"]
    named = {kind: [index for index, each in enumerate(kinds) if each == kind] for kind in range(1, 7)}
    assert named[2] == [library.unk_id()]
    assert named[3] == [library.bos_id(), library.eos_id(), library.piece_to_id("<|x|>")]
    assert named[4] == [library.piece_to_id("<|user|>")]
    assert named[5] == [count, count + 1]
    assert named[6] == [index for index in range(count) if library.is_byte(index)] and len(named[6]) == 256
    assert found["tokenizer.ggml.add_space_prefix"] is prefix
    assert found["tokenizer.ggml.add_bos_token"] is True
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": False, "add_eos_token": True, "unk_token": "<unk>"})
    )
    found = tokenizer_metadata(tmp_path, INFO, count, None)
    assert found["tokenizer.ggml.add_bos_token"] is False and found["tokenizer.ggml.add_eos_token"] is True
    assert found["tokenizer.ggml.unknown_token_id"] == library.unk_id()
    with pytest.raises(Unsupported, match=f"has {count} tokens, but the model has {count - 1}"):
        tokenizer_metadata(tmp_path, INFO, count - 1, None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_type": "unigram"}, "only BPE of sentencepiece"),
        ({"normalization_rule_name": "nmt_nfkc"}, "changes characters"),
        ({"remove_extra_whitespaces": True}, "removes spaces"),
    ],
)
def test_other_models_of_sentencepiece_are_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    sentences(tmp_path, **options)
    with pytest.raises(Unsupported, match=reason):
        tokenizer_metadata(tmp_path, INFO, 400, None)
