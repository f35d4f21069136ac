"""Images a second that one core makes into pixels, over those of transformers' processor; in turns.

    python benchmarks/vlm/images.py [--rounds 9] [--images 64] [--smoke]

JPEG files of 640 x 480 are decoded by both sides in the same way; `pixels` has the decoded images, `files` decodes them too.
Resized bicubically to 384 x 384 and normalized, as SigLIP so400m is given them. Ours are compared with theirs once: the largest
difference.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from io import BytesIO

import numpy as np
import torch
from PIL import Image

from forge_vlm.images.pixels import decode, fit_square, pixels
from forge_vlm.images.processing import Processing

HALF = (0.5, 0.5, 0.5)


def files(count: int, side: int) -> list[bytes]:
    """JPEG files with smooth content and some noise."""
    draw, found = np.random.default_rng(0), []
    for _ in range(count):
        rough = draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        image = Image.fromarray(rough).resize((side * 4 // 3, side), Image.Resampling.BICUBIC)
        content = BytesIO()
        image.save(content, "JPEG", quality=90)
        found.append(content.getvalue())
    return found


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--smoke", action="store_true", help="few images, one round")
    asked = parser.parse_args()
    from transformers import SiglipImageProcessorPil

    torch.set_num_threads(1)
    rounds, count = (1, 2) if asked.smoke else (asked.rounds, asked.images)
    processing = Processing(size=384, mean=HALF, std=HALF)
    theirs = SiglipImageProcessorPil(size={"height": 384, "width": 384}, image_mean=HALF, image_std=HALF, resample=3)
    content = files(count, 480)
    decoded = [decode(each) for each in content]
    ours_of: Callable[[Image.Image], np.ndarray] = lambda image: pixels(fit_square(image, processing), processing)  # noqa: E731
    theirs_of: Callable[[Image.Image], np.ndarray] = lambda image: theirs(image, return_tensors="np")["pixel_values"][0]  # noqa: E731
    worst = max(float(np.abs(ours_of(image) - theirs_of(image)).max()) for image in decoded[:4])
    sides: dict[str, Callable[[], object]] = {
        "pixels, ours": lambda: [ours_of(image) for image in decoded],
        "pixels, transformers": lambda: [theirs_of(image) for image in decoded],
        "files, ours": lambda: [ours_of(decode(each)) for each in content],
        "files, transformers": lambda: [theirs_of(Image.open(BytesIO(each)).convert("RGB")) for each in content],
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            begin = time.perf_counter()
            side()
            if number:
                found[name].append(count / (time.perf_counter() - begin))
    print(f"{platform.machine()}, {rounds} rounds of {count} images, largest difference {worst:.1e}")
    for kind in ("pixels", "files"):
        ours, others = found[f"{kind}, ours"], found[f"{kind}, transformers"]
        ratios = [a / b for a, b in zip(ours, others, strict=True)]
        print(
            f"{kind:6} ours {statistics.median(ours):6.0f} images/s  transformers {statistics.median(others):6.0f}  ratio "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
