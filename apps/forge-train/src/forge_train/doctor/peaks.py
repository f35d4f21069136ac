"""Peak performance of GPUs by name, from data sheets: dense products, without sparsity. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True)
class Peak:
    """Peak performance of one kind of GPU.

    Attributes:
        bf16, tf32, fp32, fp8: dense operations per second; None if the GPU does not support the dtype.
        memory: bandwidth of the GPU's memory in bytes per second.
    """

    bf16: float
    tf32: float
    fp32: float
    fp8: float | None
    memory: float


_TABLE: Mapping[str, Peak] = {
    "B200": Peak(2250 * TERA, 1125 * TERA, 75 * TERA, 4500 * TERA, 7.7 * TERA),
    "GH200": Peak(989 * TERA, 494 * TERA, 67 * TERA, 1979 * TERA, 4.0 * TERA),
    "H200 NVL": Peak(835 * TERA, 417 * TERA, 60 * TERA, 1670 * TERA, 4.8 * TERA),
    "H200": Peak(989 * TERA, 494 * TERA, 67 * TERA, 1979 * TERA, 4.8 * TERA),
    "H100 PCIe": Peak(756 * TERA, 378 * TERA, 51 * TERA, 1513 * TERA, 2.0 * TERA),
    "H100 NVL": Peak(835 * TERA, 417 * TERA, 60 * TERA, 1670 * TERA, 3.9 * TERA),
    "H100 80GB HBM3": Peak(989 * TERA, 494 * TERA, 67 * TERA, 1979 * TERA, 3.35 * TERA),
    "H800": Peak(989 * TERA, 494 * TERA, 67 * TERA, 1979 * TERA, 3.35 * TERA),
    "A100-SXM4-80GB": Peak(312 * TERA, 156 * TERA, 19.5 * TERA, None, 2.04 * TERA),
    "A100 80GB PCIe": Peak(312 * TERA, 156 * TERA, 19.5 * TERA, None, 1.94 * TERA),
    "A100-SXM4-40GB": Peak(312 * TERA, 156 * TERA, 19.5 * TERA, None, 1.56 * TERA),
    "A100-PCIE-40GB": Peak(312 * TERA, 156 * TERA, 19.5 * TERA, None, 1.56 * TERA),
    "L40S": Peak(362 * TERA, 183 * TERA, 91.6 * TERA, 733 * TERA, 0.864 * TERA),
}
"""Parts of device names; the first match wins, so a longer name comes before names that it contains."""


def peak(name: str) -> Peak | None:
    """Returns the peak of the GPU with a name; None if it is unknown, as for a slice of a GPU (MIG)."""
    return None if "MIG" in name else next((value for part, value in _TABLE.items() if part in name), None)
