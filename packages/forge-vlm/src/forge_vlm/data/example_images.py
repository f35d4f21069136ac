"""Small documents with images in each format, for the examples of sources. Each function writes into a folder."""

import json
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Picture

COUNT = 24


def picture(number: int) -> bytes:
    """Returns a PNG file that depends only on `number`."""
    draw = np.random.default_rng(number)
    content = BytesIO()
    Picture.fromarray(draw.integers(0, 256, (4 + number % 5, 6, 3), dtype=np.uint8)).save(content, "PNG")
    return content.getvalue()


CHECKED_FRAMES = tuple(picture(number) for number in range(4))
"""Frames that checks of scorers score."""
CHECKED_QUESTION = "see"
"""Question by which checks of scorers score."""


def records() -> Iterator[dict[str, Any]]:
    """Yields captions, a conversation, and text without an image; each is at most 15 bytes long, including its images."""
    for number in range(COUNT):
        name = f"{number}.png"
        if number % 4 == 3:
            yield {"text": f"text {number}"}
        elif number % 4 == 2:
            yield {"text": f"a<image>b<image>{number}", "image": [name, f"{(number + 1) % COUNT}.png"]}
        else:
            yield {"text": f"see {number}", "image": name}


def jsonl(folder: Path) -> str:
    for number in range(COUNT):
        (folder / f"{number}.png").write_bytes(picture(number))
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records()), encoding="utf-8")
    return str(path)


def shards(folder: Path) -> str:
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, COUNT, 2):
                for kind, content in (("png", picture(number)), ("txt", f"see {number}".encode())):
                    member = tarfile.TarInfo(f"{number:04d}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, BytesIO(content))
    return str(folder)


def dataset(folder: Path) -> str:
    from datasets import Dataset, Features, Image, Value

    images = [{"bytes": picture(number), "path": None} for number in range(COUNT)]
    columns = {"image": images, "text": [f"see {number}" for number in range(COUNT)]}
    Dataset.from_dict(columns, Features({"image": Image(), "text": Value("string")})).save_to_disk(str(folder / "dataset"))
    return str(folder / "dataset")


def frames(folder: Path) -> str:
    lines = []
    for clip in range(COUNT):
        (folder / str(clip)).mkdir()
        for frame in range(clip % 4 + 1):
            (folder / str(clip) / f"{frame}.png").write_bytes(picture(clip * 10 + frame))
        lines.append(json.dumps({"video": str(clip), "text": f"see {clip}"}) + "\n")
    (folder / "clips.jsonl").write_text("".join(lines))
    return str(folder / "clips.jsonl")


def questions(folder: Path) -> str:
    path = Path(frames(folder)).with_name("questions.jsonl")
    lines = (
        {"video": str(clip), "question": f"{kind}{clip % 10}", "options": ["a", "b"], "answer": "ab"[clip % 2]}
        for clip in range(COUNT)
        for kind in "xy"
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def image_text_model(folder: Path) -> str:
    """Writes a tiny CLIP with random weights, which transformers reads, and returns its folder; needs transformers."""
    import torch
    from transformers import ByT5Tokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel

    tokenizer = ByT5Tokenizer()  # bytes, so it needs no vocabulary
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    end = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": 0}
    text = {**sizes, **end, "vocab_size": len(tokenizer), "max_position_embeddings": 32}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    path = folder / "image-text"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    side = {"height": 8, "width": 8}
    CLIPImageProcessor(size=side, crop_size=side, do_center_crop=False).save_pretrained(path)
    return str(path)


def videos(folder: Path) -> str:
    for clip in range(COUNT):
        video(folder / f"{clip}.mp4", [10 * clip] * (clip % 4 + 1))
    rows = ["videoid,page_dir,name", *(f"{clip},.,see {clip}" for clip in range(COUNT))]
    (folder / "clips.csv").write_text("\n".join(rows) + "\n")
    return str(folder / "clips.csv")


def video(path: Path, grays: list[int], fps: int = 2) -> None:
    """Writes a clip whose frames have these gray values."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        stream.options = {"qscale": "1"}
        for gray in grays:
            image = np.full((32, 32, 3), gray, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
