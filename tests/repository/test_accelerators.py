"""What kind of accelerator there is, is asked in one module a package: a kind more, or one with other names, differs there only.

Whether a device is a CPU may be asked anywhere: memory of the host, and order of work, are other things on every accelerator.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(file for folder in ("packages", "apps") for file in ROOT.glob(f"{folder}/*/src/**/*.py"))
ROOMS = {
    "forge_ckpt/format/tensor_bytes.py": "what a device offers for copies",
    "forge_data/accelerator.py": "whether batches go to one",
    "forge_models/accelerator.py": "which kernels a device has",
    "forge_parallel/accelerator.py": "everything else, also for the application",
    "forge_train/doctor/torch_build.py": "judges whether this torch fits the driver and GPUs of NVIDIA",
    "forge_train/doctor/gpus.py": "judges what the driver of NVIDIA says of its GPUs",
}
KINDS = frozenset({"cuda", "xpu", "hip", "mps", "npu"})
MODULES = frozenset({"torch.accelerator", "torch.get_device_module", *(f"torch.{kind}" for kind in KINDS)})
VERSIONS = frozenset({"torch.version.cuda", "torch.version.hip", "torch.version.xpu"})
FLAGS = frozenset(f"is_{kind}" for kind in KINDS)


def asked(tree: ast.AST) -> Iterator[str]:
    """Every place of a file that names a kind of accelerator, or a module of torch for one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (node.attr in FLAGS or ast.unparse(node) in MODULES | VERSIONS):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.partition(":")[0] in KINDS:
            yield repr(node.value)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if ".".join(alias.name.split(".")[:2]) in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module.partition(".")[0] == "torch":
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (name for name in names if ".".join(name.split(".")[:2]) in MODULES or name in VERSIONS)


def test_kinds_of_accelerators_are_asked_for_in_their_rooms_only() -> None:
    assert len(SOURCES) > 300
    names = {file: file.relative_to(next(up for up in file.parents if up.name == "src")).as_posix() for file in SOURCES}
    found = {name: sorted(set(asked(ast.parse(file.read_text())))) for file, name in names.items()}
    places = {name: kinds for name, kinds in found.items() if kinds}
    assert {name: kinds for name, kinds in places.items() if name not in ROOMS} == {}
    assert places.keys() == ROOMS.keys(), "one that no longer does leaves the list"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("torch.cuda.synchronize()", "torch.cuda"),
        ("x.device.type == 'cuda'", "'cuda'"),
        ("torch.device('cuda:1')", "'cuda:1'"),
        ("x.is_cuda", "x.is_cuda"),
        ("torch.version.hip", "torch.version.hip"),
        ("torch.accelerator.current_accelerator()", "torch.accelerator"),
        ("torch.get_device_module(x.device)", "torch.get_device_module"),
        ("kind in ('cpu', 'xpu')", "'xpu'"),
    ],
)
def test_each_of_them_is_seen(line: str, found: str) -> None:
    assert set(asked(ast.parse(f"def one(x):\n    return [{line}]\n"))) == {found}


def test_imports_are_seen() -> None:
    text = "import torch.cuda.nvtx\nfrom torch import accelerator\nfrom torch.version import hip\nfrom torch.xpu import Stream\n"
    assert set(asked(ast.parse(text))) == {
        "torch.cuda.nvtx",
        "torch.accelerator",
        "torch.version.hip",
        "torch.xpu",
        "torch.xpu.Stream",
    }


def test_what_is_none_is_not() -> None:
    assert list(asked(ast.parse("x.device.type == 'cpu'\nfound.cuda\nsettings.hip\n'cuda is a kind'\n"))) == []
