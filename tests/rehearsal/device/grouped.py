"""Products of several matrices at once as CUDA makes them: what its kernel refuses is refused here, and where it has none, the
host waits for the ends of the groups, as torch's code for other precisions does (`_grouped_mm_fallback`).

The kernel of Hopper moves tiles whose addresses and strides are multiples of 16 bytes. Where groups are cut along what is
contiguous in memory, each must be such a multiple long (torch's `GroupMMCommon.cuh`, `prepare_grouped_gemm_data`); along rows,
they may end anywhere.
"""

import ctypes
import warnings
from typing import Any

ALIGNMENT = 16
MOST = 1023


def install() -> None:
    """Gives the devices the operator under `torch.nn.functional.grouped_mm`."""
    import torch

    library = torch.library.Library("aten", "IMPL", "CUDA")
    with warnings.catch_warnings(action="ignore"):  # torch warns of what takes the place of a kernel
        library.impl("_grouped_mm", grouped_mm)
    torch._forge_rehearsal_grouped = library  # torch forgets what a library that is not held has registered


def grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """a (n, k) and b (groups, k, m) -> (n, m); or a (m, n) and b (n, k), of whose n each group sums its own -> (groups, m, k)."""
    import torch

    columns = [_column_major(x) for x in (a, b)]
    if offs is None or offs.dtype != torch.int32 or offs.device != a.device or a.dim() != 2:
        raise RuntimeError("of the forms of grouped_mm, Forge has none without ends, nor with three dimensions on the left")
    if a.dtype == b.dtype == torch.bfloat16:
        if len(offs) > MOST:
            raise RuntimeError("Can't process more than 1024 groups")
        ends = list((ctypes.c_int32 * len(offs)).from_address(offs.data_ptr()))  # the kernel reads them; nothing waits
        _check_borders(a, b, ends, columns)
    else:
        ends = offs.cpu().tolist()
    shape = (len(ends), a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[2])
    out, start = torch.empty(shape, dtype=a.dtype, device=a.device), 0
    for group, end in enumerate(ends):
        if b.dim() == 2:
            out[group] = a[:, start:end] @ b[start:end]
        else:
            out[start:end] = a[start:end] @ b[group]
        start = end
    return out


def _column_major(x: Any) -> bool:
    """As `check_valid_strides_and_return_transposed`.

    Raises:
        RuntimeError: an address or a stride is not a multiple of 16 bytes, or neither of the last dimensions is contiguous.
    """
    rows, columns = x.shape[-2:]
    down, right = x.stride()[-2:]
    if x.data_ptr() % ALIGNMENT:
        raise RuntimeError("expected data_ptr to be aligned to 16 bytes")
    column_major = down == 1 and right >= max(1, rows)
    if not column_major and not (right == 1 and down >= max(1, columns)):
        raise RuntimeError(f"Invalid strides/sizes, got {x.stride()} for strides and {tuple(x.shape)} for sizes")
    if (right if column_major else down) * x.element_size() % ALIGNMENT:
        raise RuntimeError("strides should be multiple of 16 bytes")
    return column_major


def _check_borders(a: Any, b: Any, ends: list[int], columns: list[bool]) -> None:
    summed = b.dim() == 2
    along = (summed and not columns[0]) or (not summed and columns[0]) or (summed and columns[1])
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if min(lengths) < 0:
        raise RuntimeError("expected gemm dimension to be greater or equal 0")
    if along and any(length * a.element_size() % ALIGNMENT for length in lengths[:-1]):
        raise RuntimeError("expected input tensor dynamic dimension byte size to be non-negative multiple of 16")
