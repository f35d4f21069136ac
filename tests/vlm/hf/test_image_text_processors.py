"""What processors of transformers make of images reaches a class as they give it, for each form of images."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from forge_vlm.data.documents import BrokenRecord, Picture, Words
from forge_vlm.data.processor_inputs import ProcessorInputs
from forge_vlm.hf.image_arguments import ImageArguments
from vlm.hf import image_text_folder
from vlm.hf import image_text_walk as walk
from vlm.hf.image_text_folder import bytes_tokenizer

SIDE = {"height": 8, "width": 8}


def processor_of(kind: str) -> Any:
    """Returns the processor of a small model of `image_text_walk`."""
    import transformers as t

    if kind == "llava_next":
        return image_text_folder.processor_of(kind)
    if kind == "paligemma":
        images: Any = t.SiglipImageProcessorPil(size=SIDE)
        images.image_seq_length = 16
        return t.PaliGemmaProcessor(images, bytes_tokenizer("<image>", "<bos>", image_token="<image>", bos_token="<bos>"))
    named = {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>"}
    tokenizer = bytes_tokenizer(*named.values(), **named)
    if kind == "deepseek_vl":
        return t.DeepseekVLProcessor(t.DeepseekVLImageProcessorPil(size=SIDE, min_size=2), tokenizer, num_image_tokens=16)
    return t.JanusProcessor(t.JanusImageProcessorPil(size=SIDE, min_size=2), tokenizer, num_image_tokens=16)


KINDS = ["deepseek_vl", "janus", "llava_next", "paligemma"]
SIZES = ((12, 40), (30, 9))
"""Widths and heights of images."""


class ImagesAlone:
    """In the place of a processor that needs torchvision for its videos: its image processor, and the text of an image."""

    image_token = "<image>"

    def __init__(self, images: Any, count: Any) -> None:
        """
        Args:
            images: image processor.
            count: what it returns for an image -> number of placeholders.
        """
        self.images, self.count = images, count

    def __call__(self, images: Any, text: Any, **_: Any) -> dict[str, Any]:
        found = self.images(images=images, return_tensors="np")
        replacement = f"<begin>{self.image_token * int(self.count(found))}<end>"
        return {**found, "text_replacement_offsets": [[{"replacement": replacement}]], "input_ids": text}


@pytest.mark.parametrize("kind", KINDS)
def test_images_reach_a_class_as_its_processor_gives_them(kind: str) -> None:
    """Two images of a text at once, as the processor makes them, against one at a time."""
    processor = processor_of(kind)
    inputs = ProcessorInputs(walk.component(kind).image_arguments(), processor)
    images = [Image.effect_noise(size, 90).convert("RGB") for size in SIZES]
    made = [inputs.made(image) for image in images]
    whole = processor(images=images, text=["a" + 2 * inputs.token], return_tensors="np", add_special_tokens=False)
    given = inputs.arguments.arguments(torch.from_numpy(np.concatenate([one.items for one in made])), torch.float32)
    assert given.keys() == whole.keys() & {"pixel_values", "image_sizes"}
    pixels = torch.from_numpy(np.asarray(whole["pixel_values"])).flatten(0, -4)  # tiles
    assert torch.equal(given["pixel_values"], pixels)
    if "image_sizes" in given:
        assert torch.equal(given["image_sizes"], torch.as_tensor(whole["image_sizes"]))
    placeholder = processor.tokenizer.convert_tokens_to_ids(inputs.token)
    assert int((np.asarray(whole["input_ids"]) == placeholder).sum()) == sum(sum(one.counts) for one in made)


@pytest.mark.parametrize(("kind", "merged"), [("mistral3", 4), ("llava_pixtral", 1)])
def test_pixtral_gets_the_sizes_of_images(kind: str, merged: int) -> None:
    from transformers import PixtralImageProcessorPil

    side = 2 * merged**0.5
    own = PixtralImageProcessorPil(size={"longest_edge": 12}, patch_size={"height": int(side), "width": int(side)})
    processor = ImagesAlone(own, lambda found: found["image_sizes"][0].prod() // side**2)
    arguments = walk.component(kind, patches=64).image_arguments()
    images = [Image.effect_noise(size, 90).convert("RGB") for size in SIZES]
    made = [ProcessorInputs(arguments, processor).made(image) for image in images]
    theirs = own(images=images, return_tensors="pt")
    given = arguments.arguments(torch.from_numpy(np.concatenate([one.items for one in made])), torch.float32)
    assert torch.equal(given["image_sizes"], torch.as_tensor(theirs["image_sizes"]))
    assert torch.equal(given["pixel_values"], theirs["pixel_values"])
    assert [sum(one.counts) for one in made] == [one.text.count("<image>") for one in made]


def test_gemma_4_gets_the_positions_of_patches() -> None:
    from transformers import Gemma4ImageProcessorPil

    arguments = walk.component("gemma4", patches=280).image_arguments()
    own = Gemma4ImageProcessorPil(patch_size=2, pooling_kernel_size=2, max_soft_tokens=70)
    processor = ImagesAlone(own, lambda found: found["num_soft_tokens_per_image"][0])
    images = [Image.effect_noise(size, 90).convert("RGB") for size in SIZES]
    made = [ProcessorInputs(arguments, processor).made(image) for image in images]
    theirs = own(images=images, return_tensors="pt")
    given = arguments.arguments(torch.from_numpy(np.concatenate([one.items for one in made])), torch.float32)
    most = given["pixel_values"].shape[1]
    assert torch.equal(given["image_position_ids"], theirs["image_position_ids"][:, :most])
    assert (theirs["image_position_ids"][:, most:] == -1).all()
    assert torch.equal(given["pixel_values"], theirs["pixel_values"][:, :most])
    assert [sum(one.counts) for one in made] == [one.text.count("<image>") for one in made]


def test_a_row_of_an_image_of_hy_v4_ends_with_a_placeholder() -> None:
    images = pytest.importorskip("transformers.models.hy_v4_vl.image_processing_pil_hy_v4_vl")
    text = pytest.importorskip("transformers.models.hy_v4_vl.processing_hy_v4_vl")
    arguments = walk.component("hy_v4_vl", patches=280).image_arguments()
    own = images.HYV4VLImageProcessorPil(patch_size=2, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024})
    processor = ImagesAlone(own, lambda found: text.HYV4VLProcessor._num_frame_tokens(*found["image_grid_thw"][0][1:], 2))
    pictures = [Image.effect_noise(size, 90).convert("RGB") for size in SIZES]
    made = [ProcessorInputs(arguments, processor).made(picture) for picture in pictures]
    theirs = own(images=pictures, return_tensors="pt")
    given = arguments.arguments(torch.from_numpy(np.concatenate([one.items for one in made])), torch.float32)
    assert torch.equal(given["image_grid_thw"], theirs["image_grid_thw"])
    assert torch.equal(given["pixel_values"], theirs["pixel_values"])
    counts = [sum(one.counts) for one in made]
    assert counts == [one.text.count("<image>") for one in made]
    assert counts == arguments.counts(torch.from_numpy(np.concatenate([one.items for one in made]))).tolist()


def test_shapes_and_masks_are_those_of_the_patches() -> None:
    item, given, count = walk.item("lfm2_vl", 0, 1)
    arguments = walk.component("lfm2_vl").image_arguments()
    found = arguments.arguments(item[0][None], torch.float64)
    most = found["pixel_values"].shape[1]
    assert torch.equal(found["pixel_attention_mask"], given["pixel_attention_mask"][:, :most])
    assert torch.equal(found["spatial_shapes"], given["spatial_shapes"])
    assert arguments.counts(item[0][None]).tolist() == [count]


def test_a_class_that_cuts_a_lone_image_only_refuses_two_of_them() -> None:
    inputs = ProcessorInputs(walk.component("llava_onevision").image_arguments(), processor_of("llava_next"))
    parts = [Picture("a"), Words("see", learned=False), Picture("b")]
    with pytest.raises(BrokenRecord, match="has several images, which LlavaNextProcessor prepares in another way"):
        inputs.encode(parts, None, None)  # type: ignore[arg-type]


def test_paligemma_sees_both_ways_up_to_the_first_token_to_learn() -> None:
    arguments: ImageArguments = walk.component("paligemma").image_arguments()
    tokens = torch.tensor([[walk.IMAGE, 5, 6, 7, 8], [5, 6, 7, 8, 9]])
    labels = torch.tensor([[-100, -100, 7, 8, -100], [-100, -100, -100, -100, -100]])
    assert arguments.marks(tokens, labels).tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    assert not arguments.marks(tokens, None).any()
