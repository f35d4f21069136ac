"""Makes the rows of `forge_parallel/verify/rows.json` with an image-text class of transformers.

    PYTHONPATH=tests python -m vlm.hf.image_text_rows

What is in no row is refused for `[model] name = "transformers_image_text"`: every axis but those of data
and tensor parallelism, float8, and compilation.
"""

import json
from pathlib import Path

from forge_parallel.verify import proofs
from parallel.compositions.generate import Row, legal, text_of

FEATURE = "transformers_image_text"
OFFERED = (
    "dp_shard accumulate reduce_each recompute label_smoothing frozen",
    "dp_shard dp_replicate accumulate recompute recompute_full label_smoothing",
    "dp_shard dp_replicate accumulate keep_gathered muon frozen",
    "dp_shard bf16 accumulate bf16_state",
    "dp_shard accumulate recompute adamw8bit",
    "dp_shard accumulate recompute recompute_full lora",
    "dp_shard dp_replicate accumulate lora",
    "dp_shard bf16 accumulate lora",
    "tp tp_whole accumulate frozen label_smoothing",
    "dp_shard tp tp_whole accumulate recompute",
    "tp tp_whole accumulate recompute lora",
)
FAST = OFFERED[:1]
"""What every change runs; the rest is slow."""


def rows() -> dict[str, list[Row]]:
    """By kind."""
    return {
        "image_text": [frozenset(text.split()) | {FEATURE} for text in OFFERED if text in FAST],
        "image_text_slow": [frozenset(text.split()) | {FEATURE} for text in OFFERED if text not in FAST],
    }


def main() -> None:
    """Writes them next to the others."""
    path = Path(proofs.__file__).with_name("rows.json")
    document = json.loads(path.read_text())
    for kind, found in rows().items():
        assert all(legal(one) for one in found), [sorted(one) for one in found if not legal(one)]
        document[kind] = [f"{text_of(one - {FEATURE})} {FEATURE}" for one in found]
    path.write_text(json.dumps(document, indent=2) + "\n")
    print({kind: len(found) for kind, found in document.items()})


if __name__ == "__main__":
    main()
