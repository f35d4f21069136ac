"""Makes the rows of `forge_parallel/verify/rows.json` in which fusions are: each with every strategy that it is offered with.

    PYTHONPATH=tests python -m vlm.layouts

What a fusion is in no row with is refused: sequences that are cut (tp with sequence parallelism, cp), float8, other schedules of
pipelines, experts under tp, and for cross blocks pipelines, whose later stages have no images.
"""

import json
from pathlib import Path

from forge_parallel.verify import proofs
from parallel.compositions.generate import Row, legal, text_of
from parallel.compositions.rows import FUSIONS

DENSE = (
    "dp_shard tp tp_whole accumulate reduce_each recompute tied label_smoothing frozen",
    "dp_shard dp_replicate accumulate recompute recompute_full label_smoothing",
    "dp_shard accumulate keep_gathered muon tied",
    "dp_shard bf16 accumulate bf16_state",
    "dp_shard compile accumulate",
    "bf16 compile recompute",
)
STAGES = ("dp_shard pp_1f1b accumulate reshard tied frozen", "pp_interleaved accumulate recompute label_smoothing")
EXPERTS = (
    "dp_shard experts ep_all_to_all accumulate reduce_each recompute muon",
    "dp_shard dp_replicate experts ep_all_gather ep_in_turn accumulate tied label_smoothing frozen",
    "pp_1f1b dp_shard experts accumulate keep_gathered recompute recompute_full",
    "experts pp_interleaved accumulate",
    "dp_shard experts bf16 accumulate bf16_state",
)
OFFERED = {
    "fusion_joint": (*DENSE, *STAGES),
    "fusion_cross": DENSE,
    "fusion_mot": (*DENSE, *STAGES, *EXPERTS),
    "fusion_moma": EXPERTS,
    "fusion_moma_choice": EXPERTS,
    "fusion_moma_threshold": EXPERTS,
}
TIMED = {
    "fusion_joint": (*DENSE, *STAGES),
    "fusion_cross": DENSE[:1],
    "fusion_mot": EXPERTS,
    **dict.fromkeys(("fusion_moma", "fusion_moma_choice", "fusion_moma_threshold"), EXPERTS[:1]),
}
"""Rows in which the time of each frame is added to its vectors: every strategy with one fusion, every fusion with one row."""
FAST = {"fusion_cross": DENSE[:1], "fusion_mot": STAGES[:1], "fusion_moma": EXPERTS[:1]}
"""What every change runs, besides `FAST_TIMED`; the rest is slow."""
FAST_TIMED = DENSE[0]
"""The row of `fusion_joint`, with times, that every change runs, on two data ranks with two ranks of tensor parallelism each."""


def row(feature: str, text: str, *more: str) -> Row:
    return frozenset(text.split()) | {feature, *more}


def rows() -> dict[str, list[Row]]:
    """By kind."""
    every = [(feature, text) for feature in FUSIONS for text in OFFERED[feature]]
    timed = [row(feature, text, "frame_time") for feature, texts in TIMED.items() for text in texts]
    first = row("fusion_joint", FAST_TIMED, "frame_time")
    return {
        "fusions": [*(row(*one) for one in every if one[1] in FAST.get(one[0], ())), first],
        "fusions_slow": [
            *(row(*one) for one in every if one[1] not in FAST.get(one[0], ())),
            *(one for one in timed if one != first),
        ],
    }


def main() -> None:
    """Writes them next to the others."""
    path = Path(proofs.__file__).with_name("rows.json")
    document = json.loads(path.read_text())
    made = rows()
    for kind, found in made.items():
        assert all(legal(one) for one in found), [sorted(one) for one in found if not legal(one)]
        ours = [one & {*FUSIONS, "frame_time"} for one in found]
        document[kind] = [f"{text_of(one - vision)} {' '.join(sorted(vision))}" for one, vision in zip(found, ours, strict=True)]
    path.write_text(json.dumps(document, indent=2) + "\n")
    print({kind: len(found) for kind, found in document.items()})


if __name__ == "__main__":
    main()
