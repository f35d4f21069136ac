"""Makes the rows of `forge_parallel/verify/rows.json` with classes of transformers.

    PYTHONPATH=tests python -m models.hf.causal_lm_rows

What is in no row is refused for `[model] name = "transformers"`: sequences that are cut (tp with sequence parallelism, cp),
float8 under tp, experts in float8, experts under tp.
"""

import json
from pathlib import Path

from forge_parallel.verify import proofs
from parallel.compositions.generate import Row, legal, text_of

FEATURE = "transformers"
DENSE = (
    "dp_shard tp tp_whole accumulate reduce_each recompute recompute_full label_smoothing frozen",
    "dp_shard pp_1f1b accumulate recompute recompute_full keep_gathered label_smoothing",
    "dp_shard dp_replicate accumulate keep_gathered muon",
    "dp_shard bf16 accumulate bf16_state",
    "dp_shard compile accumulate",
    "bf16 compile accumulate",
    "tp tp_whole pp_1f1b accumulate",
    "dp_shard recompute accumulate adamw8bit",
    "dp_shard pp_interleaved accumulate reshard frozen",
    "tp tp_whole muon accumulate",
    "pp_1f1b bf16 accumulate bf16_state",
    "tp tp_whole bf16 accumulate",
    "tp tp_whole adamw8bit accumulate",
    "pp_1f1b muon accumulate",
    "pp_1f1b adamw8bit accumulate",
    "dp_shard float8 accumulate recompute",
    "dp_shard float8 float8_rowwise accumulate frozen",
    "dp_shard float8 float8_wide_gather pp_1f1b accumulate",
    "dp_shard compile float8 accumulate",
    "pp_1f1b bf16 bf16_state float8 float8_rowwise accumulate recompute_full recompute",
    "dp_shard accumulate recompute recompute_full lora",
    "tp tp_whole accumulate lora",
    "pp_1f1b dp_shard accumulate lora",
)
EXPERTS = (
    "dp_shard ep_all_to_all accumulate reduce_each recompute recompute_full",
    "dp_shard dp_replicate ep_all_gather accumulate label_smoothing frozen",
    "pp_1f1b dp_shard ep_all_to_all accumulate keep_gathered",
    "dp_shard ep_all_to_all muon accumulate",
    "dp_shard ep_all_to_all accumulate lora",
)
FAST = (DENSE[0], DENSE[1], EXPERTS[0], "tp tp_whole accumulate lora")
"""What every change runs; the rest is slow."""


def rows() -> dict[str, list[Row]]:
    """By kind."""
    every = [*DENSE, *EXPERTS]
    return {
        "transformers": [frozenset(text.split()) | {FEATURE} for text in every if text in FAST],
        "transformers_slow": [frozenset(text.split()) | {FEATURE} for text in every if text not in FAST],
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
