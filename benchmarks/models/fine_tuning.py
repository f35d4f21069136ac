"""Fine-tuning a class of transformers: a run of Forge over `transformers.Trainer`, tokens per second and peak memory.

    python benchmarks/models/fine_tuning.py [--rounds 3] [--steps 8] [--threads 2]
    python benchmarks/models/fine_tuning.py --device cuda --dtype mixed [--shape 1b|experts] [--rounds 3] [--steps 8]
    python benchmarks/models/fine_tuning.py --lora [--rounds 3] [--steps 8]        # against the trainer with the peft library

Both sides train the same Llama (`experts`: a Qwen3 with 64 experts in each layer) with a vocabulary of 128,000, from the same
folder on the same tokens, with AdamW and clipping, each in a process of its own, in turns. `--dtype bf16` is that of weights,
products, gradients and the state of AdamW; Forge then rounds updates stochastically, and the trainer to the nearest number. With
`mixed`, only products are in bf16. Tokens per second are those of the steps after the first two. Peak memory is that of the
process, with its libraries; on a GPU it is the most that torch had allocated there. With `--lora`, all linear layers of blocks
get adapters of rank 16 over a frozen base, on Forge's side those of its own decoder, which reads the same folder.
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

VOCAB = 128_000
SKIPPED = 2
"""Steps at the start that are not timed."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "mixed": "float32"}
"""Names of weights in torch."""
RANK, ALPHA = 16, 32


@dataclass(frozen=True)
class Shape:
    """A batch of rows, and the keys of a Llama, or of another kind of model."""

    rows: int
    length: int
    sizes: Mapping[str, int]
    kind: str = "llama"


SHAPES = {
    "small": Shape(
        4,
        256,
        {
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    "1b": Shape(
        4,
        2048,
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "experts": Shape(
        4,
        2048,
        {
            "hidden_size": 1024,
            "moe_intermediate_size": 512,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
        "qwen3_moe",
    ),
}


@dataclass(frozen=True)
class Setting:
    """What both sides do."""

    shape: str
    device: str
    dtype: str
    steps: int
    threads: int
    lora: bool = False

    @property
    def sizes(self) -> Shape:
        return SHAPES[self.shape]


def folder(path: Path, setting: Setting) -> None:
    """Writes the model."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto import CONFIG_MAPPING

    shape = setting.sizes
    config = CONFIG_MAPPING[shape.kind](
        vocab_size=VOCAB, max_position_embeddings=shape.length, tie_word_embeddings=False, **shape.sizes
    )
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, DTYPES[setting.dtype])).save_pretrained(path)


def wait(device: str) -> None:
    """Waits until the device has computed everything."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def forge(path: Path, setting: Setting) -> float:
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

    if setting.lora:
        config, source = adapted(path)
    else:
        config = TransformersConfig(folder=str(path), config=(path / "config.json").read_text())
        weights = config.weights()
        assert weights is not None
        source = lambda model: fill_from(weights, model)  # noqa: E731
    layout = Layout()
    precision = ("bf16", "fp32") if setting.dtype == "mixed" else (setting.dtype, setting.dtype)
    blueprint, topology = Blueprint.of(config.build), Topology(layout, torch.device(setting.device))
    model = realize(blueprint, Plan.of([], layout), topology, source, *precision)
    step, optimizer = Step(model, CrossEntropy().build()), AdamWConfig(lr=1e-4).build(model)
    rows, length = setting.sizes.rows, setting.sizes.length
    tokens = torch.randint(VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).to(setting.device)
    start, before = 0.0, None
    for number in range(setting.steps + SKIPPED):
        if number == SKIPPED:
            wait(setting.device)
            start = time.perf_counter()
        result = step([batch])
        clip_grad_norm(model, result.norm, 1.0)
        optimizer.step(result.skip)
        optimizer.zero_grad()
        result.send()
        if before is not None:  # as in a run, which reads the numbers of a step while the device computes the next one
            before.numbers()
        before = result
    wait(setting.device)
    return setting.steps * rows * length / (time.perf_counter() - start)


def adapted(path: Path) -> tuple[Any, Callable[[Any], None]]:
    """Returns Forge's decoder of a folder with an adapter, and a function that fills it."""
    import torch

    from forge_core.registry import Registry
    from forge_models.components.lora import LoRAConfig
    from forge_parallel.model.realize import initialize

    weights = Registry().load("forge.converters", "hf")().build().read(path)

    def fill(model: Any) -> None:
        initialize(model, 0, [name for name in model.specs.tensors if name not in model.specs.base])
        with torch.no_grad():
            for name, tensor in model.tensors():
                if name in model.specs.base:
                    piece = model.piece(name, tensor)
                    piece.local.copy_(weights.box(name, piece.offset, tuple(piece.local.shape)))

    return replace(weights.model, lora=LoRAConfig(rank=RANK, alpha=ALPHA)), fill


def trainer(path: Path, setting: Setting) -> float:
    """Trains with `transformers.Trainer`; returns tokens per second."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    times: list[float] = []
    count, length, steps = setting.sizes.rows, setting.sizes.length, setting.steps

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            if len(times) in (SKIPPED - 1, steps + SKIPPED - 1):
                wait(setting.device)
            times.append(time.perf_counter())

    dtype = getattr(torch, DTYPES[setting.dtype])
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=dtype)
    if setting.lora:
        import peft

        # All linear layers but the head. In bf16, the library would keep its adapters in fp32.
        settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    tokens = torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens] * (steps + SKIPPED)
    with tempfile.TemporaryDirectory() as out:
        options = TrainingArguments(
            out,
            max_steps=steps + SKIPPED,
            per_device_train_batch_size=count,
            learning_rate=1e-4,
            max_grad_norm=1.0,
            use_cpu=setting.device == "cpu",
            bf16=setting.dtype == "mixed",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1000,
        )
        Trainer(model=model, args=options, train_dataset=rows, callbacks=[Clock()]).train()  # type: ignore[arg-type]
    return steps * count * length / (times[-1] - times[SKIPPED - 1])


def measured(side: str, path: Path, setting: Setting) -> dict[str, float]:
    """Runs a side in a process of its own."""
    command = (sys.executable, __file__, "--side", side, "--folder", str(path), "--setting", json.dumps(asdict(setting)))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run(side: str, path: Path, setting: Setting) -> dict[str, float]:
    """Runs a side in this process."""
    import torch

    torch.set_num_threads(setting.threads)
    rate = {"forge": forge, "trainer": trainer}[side](path, setting)
    whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"rate": rate, "peak": torch.cuda.max_memory_allocated() if setting.device == "cuda" else whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="by default small on a CPU, 1b on a GPU")
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters over a frozen base")
    parser.add_argument("--side", choices=("forge", "trainer"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(run(given.side, given.folder, Setting(**json.loads(given.setting)))))
        return
    shape = given.shape or ("1b" if given.device == "cuda" else "small")
    setting = Setting(shape, given.device, given.dtype, given.steps, given.threads, given.lora)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary)
        folder(path, setting)
        found: dict[str, list[dict[str, float]]] = {"forge": [], "trainer": []}
        for number in range(given.rounds):
            for side in found if number % 2 == 0 else reversed(list(found)):
                found[side].append(measured(side, path, setting))
                print(side, {name: f"{value:,.0f}" for name, value in found[side][-1].items()}, flush=True)
    for name, what in (("rate", "tokens/s"), ("peak", "bytes")):
        ours, theirs = ([one[name] for one in found[side]] for side in ("forge", "trainer"))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print(
            f"{what}: forge {statistics.median(ours):,.0f}, trainer {statistics.median(theirs):,.0f}, ratio "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(f"{place(setting)}, {setting.dtype}, {setting.sizes.rows} x {setting.sizes.length} tokens, vocabulary {VOCAB}")


def place(setting: Setting) -> str:
    """Returns the name of the device, and the versions of the libraries."""
    import torch
    import transformers

    cpu = f"{platform.processor() or platform.machine()}, {setting.threads} threads"
    name = torch.cuda.get_device_name() if setting.device == "cuda" else cpu
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"


if __name__ == "__main__":
    main()
