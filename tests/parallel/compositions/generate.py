"""Makes `forge_parallel/verify/rows.json`: few rows that have every pair of features in them.

    PYTHONPATH=tests python -m parallel.compositions.generate

A row is legal when its recipe passes every check but the one that reads the rows, and has exactly the features that it names. A
pair is offered when some legal row has it. Pairs of features that fp64 can show are put into rows in fp64. Rows of before stay as
long as they are legal; others are made one after another: each is the best of several random ones by the number of pairs that no
row has yet, for its price.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

from forge_core.component import fields_of
from forge_core.errors import ForgeError, RecipeWarning
from forge_core.features import Feature, declared
from forge_core.registry import Registry
from forge_models.components.attentions import GQA, IndexedMLA
from forge_models.components.compressed import CompressedMQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.optim.groups import ParameterGroup
from forge_parallel.optim.optimizers import PROVEN
from forge_parallel.sections import Parallel, Precision
from forge_parallel.verify import proofs
from forge_parallel.verify.proofs import DEFAULTS, features
from forge_train.recipe.load import load_recipe
from parallel.compositions.rows import LOW, job_of, layout_of

Row = frozenset[str]

ALTERNATIVES = (
    ("", "dp_shard"),
    ("", "dp_replicate"),
    ("", "tp", "tp tp_whole"),
    ("", "cp_all_gather", "cp_ring", "cp_ulysses"),
    (
        *("", "pp_gpipe", "pp_1f1b", "pp_zbv", "pp_dualpipev"),
        *("pp_interleaved", "pp_interleaved more_stages"),
        *("pp_interleaved_zero_bubble", "pp_interleaved_zero_bubble more_stages"),
    ),
    ("", "accumulate", "accumulate reduce_each"),
    ("", "reshard", "keep_gathered"),
    ("", "recompute", "recompute recompute_full"),
    ("", "compile", "compile compile_budget"),
    ("", "bf16", "bf16 bf16_state"),
    (
        "",
        "float8",
        "float8 float8_rowwise",
        "float8 float8_wide_gather",
        "float8 float8_experts",
        "float8 float8_rowwise float8_experts",
    ),
    ("", "mtp"),
    ("", "experts"),
    ("", "ep_all_to_all", "ep_all_gather", "ep_hierarchical"),
    ("", "etp"),
    ("", "ep_in_turn"),
    ("", "tied"),
)
"""What a row chooses: one of each line."""

ANYWHERE = (
    "label_smoothing",
    "frozen",
    "lora",
    "bidirectional",
    "indexer",
    "streams",
    "value_embeddings",
    "latent_experts",
    "hash_layers",
    "compressed_keys",
    "shared_kv",
    "layer_inputs",
    "attention_chunk",
)
"""What goes with every row, and so is in one only where a pair asks for it."""

OBJECTIVES = ("dpo", "distillation", "masked_lm", "masked_diffusion", "classification")
"""Objectives other than next-token cross-entropy: such a row has one of them, where a pair asks for it."""

OPTIMIZERS = ("", "muon", "adamw8bit")
"""A further line, for rows that are to show one of them: an optimizer meets layouts only."""

NEEDS: Mapping[str, str] = {
    "compile_budget": "compile",
    "etp": "experts tp",
    "ep_all_to_all": "experts",
    "ep_all_gather": "experts",
    "ep_hierarchical": "experts",
    "ep_in_turn": "experts",
    "latent_experts": "experts",
    "hash_layers": "experts",
    "float8_experts": "experts",
    **dict.fromkeys(("masked_lm", "masked_diffusion"), "bidirectional"),
    **dict.fromkeys(
        ("pp_gpipe", "pp_1f1b", "pp_zbv", "pp_dualpipev", "pp_interleaved", "pp_interleaved_zero_bubble"), "accumulate"
    ),
}
"""What a feature is never without: it spares the search, the checks decide."""

VARIES: Mapping[str, tuple[str, ...]] = {
    "tp_whole": ("tp",),
    "reduce_each": ("accumulate",),
    "recompute_full": ("recompute",),
    "compile_budget": ("compile",),
    "bf16_state": ("bf16",),
    "float8_rowwise": ("float8",),
    "float8_wide_gather": ("float8",),
    "more_stages": ("pp_interleaved", "pp_interleaved_zero_bubble"),
    "ep_in_turn": ("ep_all_to_all", "ep_all_gather", "ep_hierarchical"),
}
"""Options that change how a feature works: a row with `tp_whole` shows nothing of `tp` as it is by default."""

SHARDS = frozenset({"dp_shard", "cp_all_gather", "cp_ring", "cp_ulysses"})
REDUCES = SHARDS | {"dp_replicate"}
IDLE: Mapping[str, frozenset[str]] = {
    "reshard": SHARDS,
    "keep_gathered": SHARDS,
    "float8_wide_gather": SHARDS,
    "reduce_each": REDUCES,
}
"""Options that do nothing where no axis shards parameters, or none reduces gradients: such a row would show nothing of them."""

ON_GPUS = frozenset({"tp_asynchronous", "offload"})
"""What a CPU refuses to run."""

NOT_OFFERED: Mapping[Row, str] = {
    frozenset({"compile_budget", "tp"}): "torch cannot partition graphs that hold process groups",
    frozenset({"compile_budget", "cp_ring"}): "torch cannot partition graphs that hold process groups",
    frozenset({"compile_budget", "recompute"}): "torch cannot partition graphs whose checkpointed parts say what is kept",
}
"""Pairs that pass the checks and do not work, with the reason; `check` refuses them because no row has them."""

GPU_ROWS = (
    "offload",
    "offload accumulate reduce_each recompute",
    "offload accumulate compile bf16",
    "offload accumulate recompute bf16 bf16_state",
    "dp_shard offload accumulate reduce_each",
    "dp_shard dp_replicate offload accumulate",
)
"""What `pytest -m gpu` compares with one process on the same device."""

FAST = 16
"""Rows of the tests that every change runs."""


def declared_features() -> set[str]:
    """Names of all features, from the code that declares them."""
    registry = Registry()
    groups = ("forge.transforms", "forge.pipeline_schedules")
    classes = [registry.load(group, name) for group in groups for name in registry.names(group)]
    found = {
        item.name
        for cls in (*classes, Parallel, Precision, DecoderConfig, MoEConfig, SigmoidTopKConfig, GQA, CrossEntropy, ParameterGroup)
        for info in fields_of(cls)
        for item in declared(info)
        if isinstance(item, Feature)
    }
    found |= set(registry.names("forge.transforms")) - set(DEFAULTS)
    found |= {f"pp_{name}" for name in registry.names("forge.pipeline_schedules")}
    found |= {
        name
        for name in registry.names("forge.optimizers")
        if getattr(registry.load("forge.optimizers", name), "shards", None) in PROVEN
    }
    objectives = (registry.load("forge.objectives", name) for name in registry.names("forge.objectives"))
    found |= {name for objective in objectives if (name := getattr(objective, "feature", ""))}
    return found | {"accumulate", GQA(causal=False).feature, IndexedMLA.feature, CompressedMQA.feature}


@cache
def _base() -> tuple[Any, list[Any]]:
    registry = Registry()
    job = load_recipe("debug", ["--hooks=[]", "--train.global_batch=1", "--train.micro_batch=1"], 1, registry).job
    entries = [entry for entry in registry.of("forge.checks") if entry.distribution != "forge-data"]
    return job, [registry.load_entry(entry) for entry in entries if entry.name != "compositions_are_proven"]


@cache
def legal(row: Row) -> bool:
    """Whether `forge-train` would take the recipe of a row, if the row were proven, and it has no other features."""
    if any(pair <= row for pair in NOT_OFFERED) or row & ON_GPUS:
        return False
    if any(option in row and row.isdisjoint(axes) for option, axes in IDLE.items()):
        return False
    base, checks = _base()
    try:
        layout = layout_of(row)
        job = job_of(row, base)
    except (ForgeError, ValueError, TypeError):
        return False
    if {use.name for use in features(job, layout)} != row:
        return False
    return all(isinstance(fault, RecipeWarning) for check in checks for fault in check(job, layout))


def price(row: Row) -> float:
    """Seconds, about: processes to wait for, and a compiler."""
    return 1 + layout_of(row).world ** 1.5 / 8 + (8 if "compile" in row else 0) + (1 if "float8" in row else 0)


def pairs_of(row: Row) -> set[Row]:
    """Each feature alone, and each pair, that a row shows. In low precision it shows no pair that fp64 could show."""
    varied = {name: option for option in row for name in VARIES.get(option, ())}
    found = {frozenset(pair) for pair in combinations(row, 2)} | {frozenset([name]) for name in row}
    found = {pair for pair in found if len(pair) == 1 or all(varied.get(name, "") in pair or name not in varied for name in pair)}
    return found if row.isdisjoint(LOW) else {pair for pair in found if pair & LOW or pair in _low_only()}


@cache
def _low_only() -> frozenset[Row]:
    """Pairs whose rows cannot be in fp64: experts compile in bf16 only."""
    names = ("experts", "etp", "ep_all_to_all", "ep_all_gather", "ep_hierarchical", "ep_in_turn")
    return frozenset(frozenset(pair) for pair in product(("compile", "compile_budget"), names))


def _random_row(wanted: Row, most: int, rng: random.Random) -> Row | None:
    """A legal row with `wanted` and few other features, on at most `most` ranks; None after many tries."""
    wanted |= {word for name in wanted for word in NEEDS.get(name, "").split()}
    if "bidirectional" in wanted and wanted.isdisjoint(OBJECTIVES):
        wanted |= {"masked_lm"}  # an objective of next tokens refuses it
    if wanted >= {"compile", "experts"}:
        wanted |= {"bf16"} | ({"recompute_full"} if "recompute" in wanted else set())
    low = wanted & LOW
    fitting = []
    for line in (*ALTERNATIVES, *([OPTIMIZERS] if wanted & set(OPTIMIZERS) else [])):
        names = set().union(*(choice.split() for choice in line))
        need = wanted & names
        fitting.append([word for word in line if need <= set(word.split()) and (low or LOW.isdisjoint(word.split()))])
    if not all(fitting):  # two choices of one line
        return None
    for _ in range(1000):
        row = frozenset(word for choices in fitting for word in _pick(choices, rng).split()) | wanted.intersection(
            (*ANYWHERE, *OBJECTIVES)
        )
        if wanted <= row and _ranks(row) <= most and legal(row):
            return row
    return None


def _ranks(row: Row) -> int:
    try:
        return layout_of(row).world
    except ForgeError:
        return 1 << 30


def _pick(choices: list[str], rng: random.Random) -> str:
    """The least of the choices more often than another one, so that rows stay small until pairs fill them."""
    return choices[0] if rng.random() < 0.7 else rng.choice(choices)


def _filled(row: Row, open_pairs: set[Row], most: int, rng: random.Random) -> Row:
    """The row with other choices of its lines, as long as each brings more open pairs for the price."""
    best, gain = row, len(pairs_of(row) & open_pairs) / price(row)
    lines = [*ALTERNATIVES, OPTIMIZERS]
    for _ in range(2):
        rng.shuffle(lines)
        for line in lines:
            here = set().union(*(choice.split() for choice in line))
            for choice in rng.sample(line, len(line)):
                other = frozenset((best - here) | set(choice.split()))
                if other == best or _ranks(other) > most or not legal(other):
                    continue
                found = len(pairs_of(other) & open_pairs) / price(other)
                if found > gain:
                    best, gain = other, found
    return best


def offered(wanted: Iterable[Row]) -> dict[Row, int]:
    """Of features and pairs those that some legal row has: the ranks that it needs, 4 or 8. A pair's answer never changes."""
    found: dict[Row, int] = {}
    for key in wanted:
        for most in (4, 8):
            row = _random_row(key, most, random.Random(0))
            if row is not None and key in pairs_of(row):
                found[key] = most
                break
    return found


def _cover(wanted: dict[Row, int], before: list[Row], rng: random.Random, say: Any) -> list[Row]:
    rows = [row for row in before if legal(row)]
    left = set(wanted) - {pair for row in rows for pair in pairs_of(row)}
    while left:
        candidates = []
        for key in rng.sample(sorted(left, key=sorted), min(8, len(left))):
            row = _random_row(key, wanted[key], rng)
            if row is not None and key in pairs_of(row):
                candidates.append(_filled(row, left, wanted[key], rng))
        if not candidates:
            continue
        best = max(candidates, key=lambda row: len(pairs_of(row) & left) / price(row))
        left -= pairs_of(best)
        rows.append(best)
        say(f"{len(rows)} rows, {len(left)} pairs left")
    return _without_idle(rows, set(wanted))


def _without_idle(rows: list[Row], wanted: set[Row]) -> list[Row]:
    """Rows whose every pair another row has go, the dearest first."""
    kept = list(rows)
    for row in sorted(rows, key=price, reverse=True):
        others = set().union(*(pairs_of(other) for other in kept if other is not row))
        if wanted <= others:
            kept.remove(row)
    return kept


def triples(rng: random.Random) -> Iterator[Row]:
    """Three axes and more together, each once: all triples of axes on eight ranks, and whole products on sixteen."""
    kinds = {
        axis: _turns([c for c in line if c], rng)
        for axis, line in zip(("dp_shard", "dp_replicate", "tp", "cp", "pp"), ALTERNATIVES, strict=False)
    }
    eps = _turns(["ep_all_to_all", "ep_all_gather", "ep_hierarchical"], rng)
    sets = [*combinations(kinds, 3), ("dp_shard", "tp", "cp", "pp"), ("dp_replicate", "tp", "cp", "pp")]
    for axes in sets:
        for experts in (False, True):
            for _ in range(200):
                words = {word for axis in axes for word in next(kinds[axis]).split()}
                words |= (
                    {"experts", next(eps)} | ({"etp"} if "tp" in axes and rng.random() < 0.5 else set()) if experts else set()
                )
                words |= {"accumulate"} if "pp" in axes or rng.random() < 0.5 else set()
                words |= {word for word in ("tied", "mtp") if rng.random() < 0.5}
                if legal(frozenset(words)):
                    yield frozenset(words)
                    break


def _axes(row: Row) -> Row:
    """What has to be in large rows: the axes together, with experts and without."""
    return row & {"dp_shard", "dp_replicate", "tp", "experts"} | {
        name.partition("_")[0] for name in row if name[:2] in ("cp", "pp")
    }


def _turns(choices: list[str], rng: random.Random) -> Iterator[str]:
    while True:
        yield from rng.sample(choices, len(choices))


def text_of(row: Row) -> str:
    """The features of a row in the order of `ALTERNATIVES`."""
    order = [word for line in (*ALTERNATIVES, OPTIMIZERS) for choice in line for word in choice.split()]
    order += [*ANYWHERE, *OBJECTIVES, *sorted(ON_GPUS)]
    return " ".join(sorted(row, key=order.index))


def main() -> None:
    """Writes the rows, the same ones each time that they start from the same."""
    rng = random.Random(0)
    names = sorted(declared_features() - ON_GPUS)
    wanted = offered([frozenset(found) for size in (1, 2) for found in combinations(names, size)])
    print(f"{len(wanted)} features and pairs are offered")
    before = proofs.proven_rows()
    rows = _cover(wanted, [*before["fast"], *before["slow"]], rng, print)
    # The fast ones: those that bring most for their price, one after another.
    fast = [row for row in before["fast"] if row in rows]
    seen = {pair for row in fast for pair in pairs_of(row)}
    small = [row for row in rows if layout_of(row).world <= 4]
    while len(fast) < FAST:
        best = max((row for row in small if row not in fast), key=lambda row: len(pairs_of(row) - seen) / price(row))
        fast.append(best)
        seen |= pairs_of(best)
    large = [row for row in before["large"] if legal(row)]
    made = {
        "fast": fast,
        "slow": [row for row in rows if row not in fast],
        "large": [*large, *(row for row in triples(rng) if not any(_axes(row) == _axes(known) for known in large))],
    }
    path = Path(proofs.__file__).with_name("rows.json")
    document = json.loads(path.read_text())  # rows of fusions are made by `vlm.layouts`
    document |= {kind: [text_of(row) for row in found] for kind, found in made.items()} | {"gpu": list(GPU_ROWS)}
    path.write_text(json.dumps(document, indent=2) + "\n")
    print({kind: len(found) for kind, found in document.items()})


if __name__ == "__main__":
    main()
