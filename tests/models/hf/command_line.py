"""`forge-train` as a user calls it, and what it is called on."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from forge_train.cli import main
from train.runs import TINY

WORDS = TINY.replace("vocab_size = 61", "vocab_size = 300") + '\n[data.tokenizer]\nname = "bytes"\n'


def run(*arguments: str | Path) -> int:
    """Exit code of `forge-train`."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def with_tokenizer(folder: Path) -> Path:
    """Adds a byte-level tokenizer of 97 tokens, of which 2 is the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate(["<pad>", "<s>", "</s>", *alphabet[:94]])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
