"""Which steps there are, in their order: cheap and causal ones first. No torch."""

from forge_train.doctor.step import Step

_STEPS = "forge_train.doctor.steps"

QUICK = (
    Step("node", f"{_STEPS}.node:examine", 120, (), "limits, shared memory, room, compiler, extras"),
    Step("torch", f"{_STEPS}.build:examine", 120, (), "torch and its CUDA against the driver and the GPUs"),
    Step("gpus", f"{_STEPS}.gpus:examine", 120, ("torch",), "errors, clocks, power, near cores; whether GPUs reach each other"),
)
"""What plain `doctor` looks at."""

ACCEPTANCE = (
    *QUICK,
    Step("device", f"{_STEPS}.device:examine", 180, ("torch",), "memory keeps what is written; products come out twice the same"),
    Step("bandwidth", f"{_STEPS}.bandwidth:examine", 180, ("torch", "device"), "copies within and between host and device"),
    Step("disk", f"{_STEPS}.disk:examine", 180, (), "write, flush and read where the run writes, as a checkpoint does"),
    Step(
        "matmul", f"{_STEPS}.matmul:examine", 300, ("torch", "device"), "products, also of the recipe's shapes, against the peak"
    ),
    Step("kernels", f"{_STEPS}.kernels:examine", 300, ("torch", "device"), "which kernels torch chooses, and how fast they are"),
    Step("numbers", f"{_STEPS}.numbers:examine", 600, ("torch", "device"), "training steps on the device against fp64 on a CPU"),
    Step("collectives", f"{_STEPS}.collectives:examine", 300, ("torch", "device"), "sums and exchanges between devices"),
    Step("training", f"{_STEPS}.training:examine", 900, ("torch", "device", "numbers"), "the recipe for some steps"),
    Step(
        "endurance", f"{_STEPS}.training:endure", 900, ("training",), "the recipe for minutes: steps stay as fast, losses finite"
    ),
    Step("tests", f"{_STEPS}.cases:examine", 1800, ("torch", "device", "numbers"), "the repository's own tests of GPUs"),
)
"""What `doctor --acceptance` looks at."""
