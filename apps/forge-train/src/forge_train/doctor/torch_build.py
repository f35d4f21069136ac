"""Checks that this torch build fits the machine's driver and GPUs. `facts` queries the machine; `judge` needs only the facts."""

import ctypes
import os
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from forge_train.doctor.step import Check, DoctorSettings

_INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/{wheel}"
_BF16 = (8, 0)


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU as torch sees it: its name, compute capability, and bytes of memory."""

    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class BuildFacts:
    """Facts that determine whether torch can use the GPUs of a node.

    Attributes:
        seen: whether the system has a visible GPU, even if torch cannot use it.
        version: version of torch.
        cuda: version of CUDA that torch was built for, such as "12.8"; empty for a build without CUDA.
        hip: version of ROCm that torch was built for; empty for a build without ROCm.
        driver: newest version of CUDA that the driver supports; None if there is no driver or it does not report a version.
        available: whether torch can use a device.
        error: torch's message if it cannot use a device.
        visible: value of CUDA_VISIBLE_DEVICES; None if it is not set.
        architectures: architectures that torch has kernels for, such as "sm_90" and "compute_90".
        devices: devices that torch can use.
        float8: minimum compute capability for float8 products.
        wants_float8: whether the recipe uses float8.
    """

    seen: bool
    version: str
    cuda: str = ""
    hip: str = ""
    driver: tuple[int, int] | None = None
    available: bool = False
    error: str = ""
    visible: str | None = None
    architectures: tuple[str, ...] = ()
    devices: tuple[VisibleGpu, ...] = ()
    float8: tuple[int, int] = (8, 9)
    wants_float8: bool = False


def examine_torch(settings: DoctorSettings) -> Iterator[Check]:
    """Step `torch`: collects facts about torch and the driver, and checks them."""
    from forge_train.recipe.load import load_recipe

    return judge(facts(("forge.transforms", "float8") in load_recipe(settings.recipe, settings.overrides).used))


def faults() -> list[str]:
    """Returns why torch cannot use the GPUs of this machine, and what to do; empty if it can."""
    wrong = (one for one in judge(facts()) if one.verdict == "FAIL")
    return [f"{one.name}: {one.value()}; needed: {one.expected}. What to do: {one.remedy}" for one in wrong]


def facts(wants_float8: bool = False) -> BuildFacts:
    """Returns the facts about this machine and this torch."""
    import torch

    from forge_parallel.accelerator import FLOAT8

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    devices: list[VisibleGpu] = []
    error = str(told[0].message) if told else ""
    for index in range(torch.cuda.device_count() if available else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(VisibleGpu(properties.name, torch.cuda.get_device_capability(index), properties.total_memory))
    return BuildFacts(
        seen=sees_gpu(),
        version=torch.__version__,
        cuda=torch.version.cuda or "",
        hip=torch.version.hip or "",
        driver=_driver(),
        available=available,
        error=error.partition("\n")[0],
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        architectures=tuple(torch.cuda.get_arch_list()) if available else (),
        devices=tuple(devices),
        float8=FLOAT8,
        wants_float8=wants_float8,
    )


def sees_gpu(root: Path = Path("/")) -> bool:
    """Whether there is a GPU: its device file exists, or `nvidia-smi -L` lists one."""
    if (root / "dev/nvidia0").exists() or (root / "dev/kfd").exists():
        return True
    command = which("nvidia-smi")
    if command is None:
        return False
    try:
        listed = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):  # nvidia-smi hangs if the driver does
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def _driver() -> tuple[int, int] | None:
    """Returns the CUDA version of the driver from its library, which does not need a working GPU; None if unknown."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed or not version.value else (version.value // 1000, version.value % 1000 // 10)


def judge(found: BuildFacts) -> Iterator[Check]:
    """Yields checks of the facts, with remedies."""
    yield Check("torch", "PASS", f"{found.version}, {_built_for(found)}")
    if not found.seen and not found.available:
        yield Check("GPU", "SKIPPED", "this machine has no visible GPU", remedy="if it has one, check that nvidia-smi lists it")
        return
    yield _built(found)
    if not found.cuda and not found.hip:
        return
    yield _drives(found)
    yield _usable(found)
    if found.devices:
        yield from _devices(found)


def _built_for(found: BuildFacts) -> str:
    return f"for CUDA {found.cuda}" if found.cuda else f"for ROCm {found.hip}" if found.hip else "without CUDA"


def _built(found: BuildFacts) -> Check:
    name, expected = "torch is built for GPUs", "a build for CUDA or ROCm, since this node has a GPU"
    if found.cuda or found.hip:
        return Check(name, "PASS", _built_for(found), expected=expected)
    wheel = "cu{}{}".format(*found.driver) if found.driver else "cu128"
    return Check(name, "FAIL", f"{found.version} has no CUDA", expected=expected, remedy=_INSTALL.format(wheel=wheel))


def _drives(found: BuildFacts) -> Check:
    """Checks the driver's CUDA version: it must have the same major version as torch's, or a later one."""
    name = "driver"
    if found.hip or found.driver is None:
        if found.available:
            return Check(name, "SKIPPED", "the driver does not report its version", remedy="none needed while the device works")
        return Check(name, "FAIL", "its library libcuda.so.1 cannot be loaded", remedy="install the driver of NVIDIA")
    major, told = int(found.cuda.partition(".")[0]), "CUDA {}.{}".format(*found.driver)
    expected = f"CUDA {major}.0 or newer, for torch built for {found.cuda}"
    if found.driver[0] < major:
        other = _INSTALL.format(wheel="cu{}{}".format(*found.driver))
        return Check(
            name,
            "FAIL",
            f"supports {told} at most",
            expected=expected,
            remedy=f"install a newer driver, or a torch for this one: {other}",
        )
    return Check(name, "PASS", f"supports {told}", expected=expected)


def _usable(found: BuildFacts) -> Check:
    name, expected = "torch can use a device", "torch.cuda.is_available()"
    if found.available:
        return Check(name, "PASS", f"{len(found.devices)} devices", expected=expected)
    if found.visible is not None and found.visible.strip() in ("", "-1"):
        remedy = f"CUDA_VISIBLE_DEVICES = {found.visible!r} hides every device: unset it, or request a GPU from the scheduler"
    else:
        remedy = "first fix the driver, above; then check that the container has GPUs (--gpus all) and nvidia_uvm is loaded"
    return Check(name, "FAIL", found.error or "it cannot", expected=expected, remedy=remedy)


def _devices(found: BuildFacts) -> Iterator[Check]:
    kinds = sorted({(device.name, device.memory) for device in found.devices})
    told = ", ".join(f"{name}, {memory / 2**30:.0f} GiB" for name, memory in kinds)
    alike = "all devices of a node are of one kind"
    if len(kinds) > 1:
        remedy = "ranks wait for the slowest device: select devices of one kind with CUDA_VISIBLE_DEVICES"
        yield Check("devices are alike", "SLOW", told, expected=alike, remedy=remedy)
    else:
        yield Check("devices are alike", "PASS", f"{len(found.devices)} x {told}", expected=alike)
    if found.hip:
        return
    without = sorted({device.name for device in found.devices if not has_kernels(device.capability, found.architectures)})
    listed = " ".join(found.architectures)
    if found.architectures and without:
        remedy = "install a torch that has kernels for this GPU's compute capability"
        yield Check("kernels", "FAIL", f"none for {', '.join(without)}", expected=f"one of {listed}", remedy=remedy)
    elif found.architectures:
        yield Check("kernels", "PASS", listed)
    least = min(device.capability for device in found.devices)
    told = "compute capability {}.{}".format(*least)
    if least < _BF16:
        yield Check("bf16", "SLOW", told, expected="8.0 or more", remedy="precision.compute = 'fp32', or a GPU from Ampere on")
    else:
        yield Check("bf16", "PASS", told, expected="8.0 or more")
    expected = "{}.{} or more".format(*found.float8)
    if least >= found.float8:
        yield Check("float8", "PASS", told, expected=expected)
    elif found.wants_float8:
        remedy = "remove transforms.float8: it is emulated here, which is slower than bf16"
        yield Check("float8", "SLOW", f"the recipe uses it; {told}", expected=expected, remedy=remedy)
    else:
        yield Check("float8", "SKIPPED", told, expected=expected, remedy="remove transforms.float8 from recipes for this GPU")


def has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a device can run a build: it has machine code for the same major version, or PTX, for no newer capability."""
    for text in architectures:
        kind, _, digits = text.partition("_")
        number = "".join(letter for letter in digits if letter.isdigit())  # sm_90a ends with a letter
        built = int(number[:-1]), int(number[-1])
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False
