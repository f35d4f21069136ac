"""Transforms, which change a model for a layout or for speed; one file or folder each.

    from torch import nn
    from forge_parallel import parallelize
    from forge_parallel.transforms import Recompute

    def build():
        return nn.Sequential(nn.Linear(8, 16), nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), nn.Linear(16, 1))

    model = parallelize(build, "1", [Recompute(policy="full")])

A layout implies the transforms that it needs. Name one of those only to change its options, such as
`FullyShard(reduce="each")`.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_parallel.transforms.compile import Compile
    from forge_parallel.transforms.context.transform import ContextParallel
    from forge_parallel.transforms.dispatchers import AllGatherDispatcher, AllToAllDispatcher
    from forge_parallel.transforms.expert import ExpertParallel
    from forge_parallel.transforms.float8.transform import Float8
    from forge_parallel.transforms.recompute import Recompute
    from forge_parallel.transforms.shard import FullyShard
    from forge_parallel.transforms.tensor.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        VocabParallelHead,
    )
    from forge_parallel.transforms.tensor.rules import Role, tensor_parallel_rules
    from forge_parallel.transforms.tensor.transform import TensorParallel

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "ColumnParallelLinear",
    "Compile",
    "ContextParallel",
    "ExpertParallel",
    "Float8",
    "FullyShard",
    "Recompute",
    "Role",
    "RowParallelLinear",
    "TensorParallel",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "tensor_parallel_rules",
]
__getattr__, __dir__ = lazy_exports(__name__)
