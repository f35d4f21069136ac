"""Folders of small image-text models with processors, as transformers saves them, and records with images for them."""

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vlm.hf import image_text_walk as walk

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}IMAGE{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template; IMAGE is what it writes for an image."""
ENDS = ["<|im_start|>", "<|im_end|>"]
TOKENS = {
    "llava": ["<image>"],
    "llava_next": ["<image>"],
    "idefics3": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"],
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
}
MARKS = {"llava": "<image>", "llava_next": "<image>", "idefics3": "<image>", "gemma3": "<start_of_image>"}
PLACEHOLDER = {"llava": "<image>", "llava_next": "<image>", "idefics3": "<image>", "gemma3": "<image_soft_token>"}


def tokenizer_of(kind: str) -> Any:
    """Returns a tokenizer of bytes with the special tokens of a kind."""
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)] if kind == "idefics3" else []
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    return bytes_tokenizer(*TOKENS[kind], *rows, **(named if kind == "gemma3" else {}))


def bytes_tokenizer(*special: str, **named: str) -> Any:
    """Returns a tokenizer of bytes with special tokens, of which some have names for processors."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*ENDS, *special)])
    more: dict[str, Any] = {"extra_special_tokens": named} if named else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", **more)


def processor_of(kind: str) -> Any:
    """Returns the processor of a small model: tiles of 8 x 8 pixels."""
    import transformers

    tokenizer, template = tokenizer_of(kind), TEMPLATE.replace("IMAGE", MARKS[kind])
    if kind == "llava":
        images: Any = transformers.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
        keys = {"patch_size": 2, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return transformers.LlavaProcessor(images, tokenizer, chat_template=template, **keys)
    if kind == "llava_next":
        side, sizes = {"height": 8, "width": 8}, [[8, 16], [16, 8]]
        images = transformers.LlavaNextImageProcessorPil(size={"shortest_edge": 8}, crop_size=side, image_grid_pinpoints=sizes)
        keys = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return transformers.LlavaNextProcessor(images, tokenizer, chat_template=template, **keys)
    if kind == "idefics3":
        images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 16}, max_image_size={"longest_edge": 8})
        return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    images = transformers.Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
    return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


def folder_of(path: Path, kind: str) -> Path:
    """Writes a model with drawn weights, its processor and its tokenizer."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    processor = processor_of(kind)
    token = processor.tokenizer.convert_tokens_to_ids(PLACEHOLDER[kind])
    values = json.loads(walk.small(kind))
    # A window of the whole row, so that an answer sees the image.
    size = {"vocab_size": 288, "sliding_window": 256, "max_position_embeddings": 256, "eos_token_id": 257, "pad_token_id": 257}
    values |= {"image_token_id": token, "image_token_index": token, "text_config": {**values["text_config"], **size}}
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind].from_dict(values)).save_pretrained(path)
    processor.save_pretrained(path)
    return path


def records_of(folder: Path, count: int = 12) -> Path:
    """Writes images and conversations: with one image, with two, and with none."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        names = [f"{number}-{index}.png" for index in range((1, 2, 0)[number % 3])]
        for index, name in enumerate(names):
            Image.new("RGB", (8 + 4 * (number % 3), 8 + 3 * index), (20 * number % 255, 90, 200 - 10 * number)).save(
                folder / name
            )
        asked = "".join(f"<image>{'ab'[index]}" for index in range(len(names))) + "which?"
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"number {number % 4}"}]
        rows.append({"messages": turns, "image": names})
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe_of(path: Path, folder: Path, records: Path, more: str = "") -> Path:
    """Writes the recipe of a small run."""
    path.write_text(
        f"""
[job]
name = "images"
seed = 3

[model]
name = "transformers_image_text"
folder = "{folder}"

[data]
sequence_length = 176
packing = "pad"
evaluation = {{}}
tokenizer = {{ name = "bpe", path = "{folder}/tokenizer.json", eos = "<|im_end|>" }}

[[data.sources]]
name = "image_jsonl"
path = "{records}"
template = "{folder}"

[train]
max_steps = 4
threads = 1
global_batch = 4
micro_batch = 2

[precision]
compute = "fp32"

[optimizer]
name = "adamw"
lr = 1e-2

[schedule]
name = "constant"
warmup = 0

[checkpoint]
every = 100

[[hooks]]
name = "save"
{more}
"""
    )
    return path
