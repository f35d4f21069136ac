"""Fine-tuning a class of transformers: a run of Forge over `transformers.Trainer`, tokens per second and peak memory.

    python benchmarks/models/fine_tuning.py [--rounds 3] [--steps 8] [--threads 2]

Both sides train the same Llama with a vocabulary of 128,000, from the same folder on the same tokens, in fp32 with AdamW and
clipping, each in a process of its own, in turns. Tokens per second are those of the steps after the first two; peak memory is
that of the process, with its libraries.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS, LENGTH, VOCAB = 4, 256, 128_000
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
SKIPPED = 2
"""Steps at the start that are not timed."""


def folder(path: Path) -> None:
    """Writes the model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, tie_word_embeddings=False, **SIZES)
    ).save_pretrained(path)


def forge(path: Path, steps: int) -> float:
    """Trains with Forge; returns tokens per second."""
    import torch

    from forge_core.batch import Batch
    from forge_core.layout import Layout
    from forge_models.components.transformers import TransformersConfig
    from forge_models.objectives import CrossEntropy
    from forge_parallel.model.plan import Plan
    from forge_parallel.model.realize import Blueprint, realize
    from forge_parallel.optim.optimizers import AdamWConfig
    from forge_parallel.placement.topology import Topology
    from forge_parallel.step.reduce import clip_grad_norm
    from forge_parallel.step.step import Step
    from forge_train.inference.stored import fill_from

    config = TransformersConfig(folder=str(path), config=(path / "config.json").read_text())
    weights = config.weights()
    assert weights is not None
    layout = Layout()
    blueprint, topology = Blueprint.of(config.build), Topology(layout, torch.device("cpu"))
    model = realize(blueprint, Plan.of([], layout), topology, lambda model: fill_from(weights, model))
    step, optimizer = Step(model, CrossEntropy().build()), AdamWConfig(lr=1e-4).build(model)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batch, start = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), 0.0
    for number in range(steps + SKIPPED):
        if number == SKIPPED:
            start = time.perf_counter()
        result = step([batch])
        clip_grad_norm(model, result.norm, 1.0)
        optimizer.step(result.skip)
        optimizer.zero_grad()
        result.numbers()
    return steps * ROWS * LENGTH / (time.perf_counter() - start)


def trainer(path: Path, steps: int) -> float:
    """Trains with `transformers.Trainer`; returns tokens per second."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            times.append(time.perf_counter())

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens] * (steps + SKIPPED)
    with tempfile.TemporaryDirectory() as out:
        options = TrainingArguments(
            out,
            max_steps=steps + SKIPPED,
            per_device_train_batch_size=ROWS,
            learning_rate=1e-4,
            max_grad_norm=1.0,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1000,
        )
        Trainer(model=model, args=options, train_dataset=rows, callbacks=[Clock()]).train()  # type: ignore[arg-type]
    return steps * ROWS * LENGTH / (times[-1] - times[SKIPPED - 1])


def measured(side: str, path: Path, steps: int, threads: int) -> dict[str, float]:
    """Runs a side in a process of its own."""
    command = (sys.executable, __file__, "--side", side, "--folder", str(path), "--steps", str(steps), "--threads", str(threads))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", choices=("forge", "trainer"))
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.side:
        import torch

        torch.set_num_threads(given.threads)
        rate = {"forge": forge, "trainer": trainer}[given.side](given.folder, given.steps)
        print(json.dumps({"rate": rate, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
        return
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary)
        folder(path)
        found: dict[str, list[dict[str, float]]] = {"forge": [], "trainer": []}
        for number in range(given.rounds):
            for side in found if number % 2 == 0 else reversed(list(found)):
                found[side].append(measured(side, path, given.steps, given.threads))
                print(side, {name: f"{value:,.0f}" for name, value in found[side][-1].items()}, flush=True)
    for name, what in (("rate", "tokens/s"), ("peak", "bytes")):
        ours, theirs = ([one[name] for one in found[side]] for side in ("forge", "trainer"))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print(
            f"{what}: forge {statistics.median(ours):,.0f}, trainer {statistics.median(theirs):,.0f}, ratio "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(f"{platform.processor() or platform.machine()}, {given.threads} threads, {ROWS} x {LENGTH} tokens, vocabulary {VOCAB}")


if __name__ == "__main__":
    main()
