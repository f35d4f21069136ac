"""No line on a step's path, nor in the copies of a checkpoint, makes the host wait for the device, but for those that are listed
with a reason.

A tensor made from numbers of the host is copied from pageable memory, and the copy is waited for; `torch.full` fills in on the
device. What is read on the host waits for all that was queued before. How often each runs is counted by `tests/rehearsal`.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
ROOMS = {
    "forge_ckpt": ("format/tensor_bytes.py",),
    "forge_models": ("blocks",),
    "forge_parallel": ("step", "optim", "transforms", "pipeline"),
}
READS = frozenset({"item", "tolist", "cpu", "nonzero", "synchronize"})
COPIES = frozenset({"torch.tensor", "torch.as_tensor"})

ALLOWED = {
    "forge_ckpt/format/tensor_bytes.py queued: synchronize": (1, "of the event of one chunk, when its buffer is needed"),
    "forge_models/blocks/attention.py boundaries: nonzero": (1, "the kernel of variable lengths needs their number"),
    "forge_models/blocks/cache.py KVCache.counts: tolist": (2, "in generation only, for the text of an error"),
    "forge_models/blocks/cache.py KVCache.counts: torch.tensor": (1, "in generation only, for rows of unequal lengths"),
    "forge_models/blocks/fla_kernels.py _error: item": (1, "in the test of a kernel, before its first use"),
    "forge_models/blocks/fla_kernels.py _sequences: nonzero": (1, "the kernels need the number of documents, once per batch"),
    "forge_models/blocks/moe/experts.py _few_busy: nonzero": (1, "only on a CPU"),
    "forge_models/blocks/moe/experts.py _products: tolist": (
        1,
        "the kernel `loop`, where no grouped product takes precision or width",
    ),
    "forge_parallel/transforms/dispatchers.py AllGatherDispatcher: tolist": (
        1,
        "ranks may have different numbers of tokens",
    ),
    "forge_parallel/transforms/dispatchers.py on_host: tolist": (
        1,
        "rows that travel are counted on the host by the collective",
    ),
    "forge_parallel/optim/elementwise.py ElementwiseOptimizer.__init__: torch.tensor": (
        1,
        "once, with the optimizer; no step makes one",
    ),
    "forge_parallel/optim/elementwise.py _parts: torch.tensor": (2, "once, with the optimizer; no step makes one"),
    "forge_parallel/optim/adamw8bit.py Blocks.numbers: torch.tensor": (1, "once, with the optimizer; no step makes one"),
    "forge_parallel/step/pipeline.py PipelineRunner._told: torch.tensor": (1, "in the first step only"),
    "forge_parallel/step/pipeline.py PipelineRunner._told: tolist": (1, "in the first step only"),
    "forge_parallel/step/step.py DeferredRead.numbers: synchronize": (
        1,
        "the verdict of a step, read a step later",
    ),
    "forge_parallel/step/step.py DeferredRead.numbers: tolist": (1, "of memory of the host, once the numbers are there"),
    "forge_parallel/step/step.py Step.evaluate: tolist": (1, "the result of a whole evaluation"),
}
"""How often, and why."""


def waits(tree: ast.AST, where: str = "") -> Iterator[str]:
    """`function: call` of every call that waits, or names a function that does, in the order of the file."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inside = f"{where}.{node.name}".removeprefix(".") if named else where
        if isinstance(node, ast.Attribute) and node.attr in READS:
            yield f"{where}: {node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in COPIES and "device" in {key.arg for key in node.keywords}:
            yield f"{where}: {ast.unparse(node.func)}"
        yield from waits(node, inside)


def test_lines_that_wait_are_those_that_are_listed() -> None:
    found: Counter[str] = Counter()
    for package, rooms in ROOMS.items():
        source = PACKAGES / package.replace("_", "-") / "src" / package
        for room in rooms:
            files = [source / room] if room.endswith(".py") else sorted((source / room).rglob("*.py"))
            assert files, f"{package}/{room} does not exist"
            for file in files:
                name = file.relative_to(source.parent).as_posix()
                found.update(f"{name} {wait}" for wait in waits(ast.parse(file.read_text())))
    assert dict(found) == {place: count for place, (count, _) in ALLOWED.items()}


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("torch.tensor(3, device=x.device)", "torch.tensor"),
        ("torch.as_tensor([1, 2], dtype=d, device=x.device)", "torch.as_tensor"),
        ("float(x.sum().item())", "item"),
        ("x[0].tolist()", "tolist"),
        ("x.detach().cpu().numpy()", "cpu"),
        ("x.flatten().nonzero()", "nonzero"),
        ("torch.nonzero(x)", "nonzero"),
        ("x.event.synchronize()", "synchronize"),
        ("sorted(x, key=Tensor.tolist)", "tolist"),
        ("torch.accelerator.synchronize()", "synchronize"),
    ],
)
def test_each_of_them_is_seen(line: str, call: str) -> None:
    text = f"class One:\n    def two(self, x):\n        return [{line} for _ in x]\n"
    assert list(waits(ast.parse(text))) == [f"One.two: {call}"]


@pytest.mark.parametrize("line", ["torch.full((), 3, device=x.device)", "torch.tensor(3)", "torch.nonzero_static(x, size=2)"])
def test_what_does_not_wait_is_not(line: str) -> None:
    assert list(waits(ast.parse(f"def one(x):\n    return {line}\n"))) == []
