"""Which steps there are, in their order: cheap and causal ones first. No torch."""

from forge_train.doctor.step import Step

QUICK = (
    Step("node", "forge_train.doctor.steps.node:examine_node", 120, (), "limits, shared memory, room, compiler, extras"),
    Step("torch", "forge_train.doctor.steps.build:examine_torch", 120, (), "torch and its CUDA against the driver and the GPUs"),
    Step(
        "gpus",
        "forge_train.doctor.steps.gpus:examine_gpus",
        120,
        ("torch",),
        "errors, clocks, power, near cores; whether GPUs reach each other",
    ),
)
"""What plain `doctor` looks at."""

ACCEPTANCE = (
    *QUICK,
    Step(
        "device",
        "forge_train.doctor.steps.device:examine_device",
        180,
        ("torch",),
        "memory keeps what is written; products come out twice the same",
    ),
    Step(
        "bandwidth",
        "forge_train.doctor.steps.bandwidth:examine_bandwidth",
        180,
        ("torch", "device"),
        "copies within and between host and device",
    ),
    Step(
        "disk",
        "forge_train.doctor.steps.disk:examine_disk",
        180,
        (),
        "write, flush and read where the run writes, as a checkpoint does",
    ),
    Step(
        "matmul",
        "forge_train.doctor.steps.matmul:examine_matmul",
        300,
        ("torch", "device"),
        "products, also of the recipe's shapes, against the peak",
    ),
    Step(
        "kernels",
        "forge_train.doctor.steps.kernels:examine_kernels",
        300,
        ("torch", "device"),
        "which kernels torch chooses, and how fast they are",
    ),
    Step(
        "numbers",
        "forge_train.doctor.steps.numbers:examine_numbers",
        600,
        ("torch", "device"),
        "training steps on the device against fp64 on a CPU",
    ),
    Step(
        "collectives",
        "forge_train.doctor.steps.collectives:examine_collectives",
        300,
        ("torch", "device"),
        "sums and exchanges between devices",
    ),
    Step(
        "training",
        "forge_train.doctor.steps.training:examine_training",
        900,
        ("torch", "device", "numbers"),
        "the recipe for some steps",
    ),
    Step(
        "endurance",
        "forge_train.doctor.steps.training:endure",
        900,
        ("training",),
        "the recipe for minutes: steps stay as fast, losses finite",
    ),
    Step(
        "tests",
        "forge_train.doctor.steps.cases:examine_tests",
        1800,
        ("torch", "device", "numbers"),
        "the repository's own tests of GPUs",
    ),
)
"""What `doctor --acceptance` looks at."""
