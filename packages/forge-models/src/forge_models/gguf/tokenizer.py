"""Metadata of a tokenizer in a GGUF file, from the files of a tokenizer for transformers."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_core.protocols.weights import WeightsInfo
from forge_models.hf.config import Unsupported

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens, numbered as in sentencepiece, which also has unknown (2) and byte (6)."""
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {rf"{WORDS}\p{{N}}{{1,3}}{REST}": "llama-bpe", rf"{WORDS}\p{{N}}{REST}": "qwen2"}
"""Pattern that splits text into words -> the name of the pre-tokenizer that has it."""
HINT = "give the name that llama.cpp has for it with --pre-tokenizer, or leave the tokenizer out with --pre-tokenizer none"


def tokenizer_metadata(folder: Path | None, facts: WeightsInfo, vocab_size: int, pre: str | None) -> dict[str, Any]:
    """Returns the keys `tokenizer.*`; without a folder, only that there is no tokenizer, and the ids of special tokens.

    Args:
        folder: folder with `tokenizer.json`, or `tokenizer.model` of sentencepiece.
        facts: ids of special tokens, and of those that end generation.
        vocab_size: number of rows of the embedding; rows beyond the tokenizer's get names of unused tokens.
        pre: name of the pre-tokenizer; None = recognized from the files, `none` = the tokenizer is left out.

    Raises:
        Unsupported: the format cannot describe the tokenizer, or it has more tokens than the model.
    """
    if folder is None or pre == "none":
        return {"tokenizer.ggml.model": "none"} | _special(facts)
    settings = _json(folder / "tokenizer_config.json")
    pieces, content = folder / "tokenizer.model", folder / "tokenizer.json"
    if pieces.is_file() and ((_json(content).get("model") or {}).get("byte_fallback") or not content.is_file()):
        found = _sentencepiece(pieces, settings, vocab_size)
    elif content.is_file():
        found = _byte_level(content, vocab_size, pre)
    else:
        raise Unsupported(f"{folder} has neither tokenizer.json nor tokenizer.model; {HINT}")
    named = _special(facts)
    tokens = {text: index for index, text in enumerate(found["tokenizer.ggml.tokens"])}
    for key, name in {"unk_token": "unknown", "pad_token": "padding", "bos_token": "bos", "eos_token": "eos"}.items():
        text = settings.get(key)
        text = text.get("content") if isinstance(text, dict) else text
        if text in tokens:
            named.setdefault(f"tokenizer.ggml.{name}_token_id", tokens[text])
    if found["tokenizer.ggml.model"] == "gpt2":
        found |= _around(content, named)
    template = _template(folder, settings)
    return found | named | ({} if template is None else {"tokenizer.chat_template": template})


def _special(facts: WeightsInfo) -> dict[str, int]:
    """Returns the ids of special tokens. The further tokens that end generation are the end of a turn and of a message."""
    known = facts.special_tokens
    ends = known.get("eos_token_id")
    ends = [*(ends if isinstance(ends, list) else [] if ends is None else [ends])]
    ends = list(dict.fromkeys([*ends, *facts.ends]))
    if len(ends) > 3:
        raise Unsupported(
            f"{len(ends)} tokens end generation, but a GGUF file names 3 at most; shorten eos_token_id of the generation settings"
        )
    found = dict(zip(("eos", "eot", "eom"), ends, strict=False))
    found |= {"bos": known.get("bos_token_id"), "padding": known.get("pad_token_id")}
    return {f"tokenizer.ggml.{name}_token_id": index for name, index in found.items() if type(index) is int}


def _byte_level(path: Path, vocab_size: int, pre: str | None) -> dict[str, Any]:
    """Returns the metadata of a `tokenizer.json` with byte-level BPE."""
    content = _json(path)
    model = content.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE with bytes as a fallback" if model.get("byte_fallback") else model.get("type")
        raise Unsupported(f"{path}: a tokenizer of kind {kind} is not implemented; only byte-level BPE is; {HINT}")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    name = pre or _pre(path, content, merges)
    texts = {index: text for text, index in model["vocab"].items()}
    kinds = dict.fromkeys(texts, NORMAL)
    for entry in content.get("added_tokens", []):
        texts[entry["id"]] = entry["content"]
        kinds[entry["id"]] = CONTROL if entry.get("special") else USER_DEFINED
    if texts and max(texts) >= vocab_size:
        raise Unsupported(f"{path} has the id {max(texts)}, but the model has {vocab_size} tokens; pass another with --tokenizer")
    tokens = [texts.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(index, UNUSED) for index in range(vocab_size)],
        "tokenizer.ggml.merges": merges,
    }


def _pre(path: Path, content: Mapping[str, Any], merges: list[str]) -> str:
    """Returns the name of the pre-tokenizer that splits text as a `tokenizer.json` does.

    Raises:
        Unsupported: none is known.
    """
    normalizer = (content.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise Unsupported(f"{path}: the normalizer {normalizer} is not implemented; {HINT}")
    before = content.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", []) if before.get("type") == "Sequence" else [before]
    if any(step.get("add_prefix_space") for step in steps):
        raise Unsupported(f"{path}: a space before the text (add_prefix_space) is not implemented; {HINT}")
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and (steps[0].get("use_regex", True) or not merges):
        name = "gpt-2"  # without merges, every byte is a token however text is split
    elif kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        name = "smollm"
    elif kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = (steps[0].get("pattern") or {}).get("Regex", "")
        plain = steps[0].get("behavior") in ("Isolated", "Removed") and steps[0].get("invert", False) == (
            steps[0].get("behavior") == "Removed"
        )
        name = SPLITS.get(pattern, "") if plain else ""
    else:
        name = ""
    if not name:
        raise Unsupported(f"{path}: its way to split text into words is not one that Forge knows in GGUF; {HINT}")
    whole = bool((content.get("model") or {}).get("ignore_merges"))
    if merges and whole != (name == "llama-bpe"):
        raise Unsupported(f"{path}: pre-tokenizer {name} with ignore_merges {str(whole).lower()} is not implemented; {HINT}")
    return name


def _around(path: Path, special: Mapping[str, Any]) -> dict[str, bool]:
    """Returns whether texts begin and end with a special token; `special` has the ids of special tokens.

    Raises:
        Unsupported: the tokenizer adds other tokens.
    """
    step = _json(path).get("post_processor") or {}
    steps = step.get("processors", []) if step.get("type") == "Sequence" else [step]
    before: list[int] = []
    after: list[int] = []
    for each in steps:
        if each.get("type") in (None, "ByteLevel"):
            continue
        if each.get("type") != "TemplateProcessing":
            raise Unsupported(f"{path}: the post-processor {each.get('type')} is not implemented; {HINT}")
        ids = {name: entry["ids"] for name, entry in each.get("special_tokens", {}).items()}
        side = before
        for piece in each.get("single", []):
            if "Sequence" in piece:
                side = after
            else:
                side += ids[piece["SpecialToken"]["id"]]
    begin, end = (special.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    if before not in ([], [begin]) or after not in ([], [end]):
        raise Unsupported(
            f"{path} adds tokens {before} before and {after} after a text; only bos_token_id before and eos_token_id after it "
            f"are implemented; {HINT}"
        )
    return {"tokenizer.ggml.add_bos_token": bool(before), "tokenizer.ggml.add_eos_token": bool(after)}


def _sentencepiece(path: Path, settings: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Returns the metadata of a `tokenizer.model` of sentencepiece with BPE.

    Fields of the file (a protocol buffer): 1 = pieces (1 text, 2 score, 3 kind), 2 = trainer (3 kind of model, 2 is BPE),
    3 = normalizer (2 table, 3 a space before the text, 4 whether spaces are removed).
    """
    fields = list(_fields(path.read_bytes()))
    trainer, normalizer = (dict(_fields(next((value for key, value in fields if key == number), b""))) for number in (2, 3))
    if trainer.get(3, 1) != 2:
        raise Unsupported(f"{path}: only BPE of sentencepiece is implemented, and this is another kind of model; {HINT}")
    if normalizer.get(2) or normalizer.get(4, 1):
        raise Unsupported(f"{path} changes characters or removes spaces before it splits a text; that is not implemented; {HINT}")
    pieces = [dict(_fields(value)) for key, value in fields if key == 1]
    if len(pieces) > vocab_size:
        raise Unsupported(f"{path} has {len(pieces)} tokens, but the model has {vocab_size}; pass another with --tokenizer")
    rest = range(len(pieces), vocab_size)
    scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*(piece[1].decode() for piece in pieces), *(f"[PAD{index}]" for index in rest)],
        "tokenizer.ggml.scores": [*scores, *(-1000.0 for _ in rest)],
        "tokenizer.ggml.token_type": [*(piece.get(3, NORMAL) for piece in pieces), *(UNUSED for _ in rest)],
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
        "tokenizer.ggml.add_bos_token": settings.get("add_bos_token", True) is True,
        "tokenizer.ggml.add_eos_token": settings.get("add_eos_token") is True,
    }


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yields number and value of the fields of a protocol buffer: integers, and bytes of everything else."""
    at = 0

    def integer() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = content[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(content):
        key = integer()
        kind = key & 7
        if kind == 0:
            yield key >> 3, integer()
            continue
        size = {1: 8, 5: 4}.get(kind) or integer()
        yield key >> 3, content[at : at + size]
        at += size


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Returns the chat template of a tokenizer's folder.

    Raises:
        Unsupported: there are several, and none is the default.
    """
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    found = _json(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(found, list):
        by_name = {entry.get("name"): entry.get("template") for entry in found}
        if "default" not in by_name:
            raise Unsupported(
                f"{folder} has the chat templates {', '.join(map(str, by_name))}, and none is the default; keep one"
            )
        return by_name["default"]
    return found if isinstance(found, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise Unsupported(f"{path} is not JSON: {cause}") from cause
    return found if isinstance(found, dict) else {}
