"""The recurrences with the Triton kernels of flash-linear-attention, on a GPU: `kernel = "fla"` of a recurrent layer.

The functions have the arguments and results of `gated_delta_rule`, `channel_delta_rule` and `state_space`. The kernels multiply
in TF32 or in 16 bits, and choose their tiles by timing them, so results differ from those of plain torch by rounding.

A kernel is used only after it has passed a test: on a small input with the widths, dtype and device of the model, values and
gradients must equal those of plain torch in fp64. Documents of a row are separate sequences for a kernel, and the host reads
where they begin, once per batch.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import inf, isnan
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from forge_core.errors import ForgeError
from forge_models.accelerator import current, is_nvidia
from forge_models.blocks import channel_delta, delta_rule, state_space
from forge_models.blocks.chunks import CHUNK
from forge_models.torch_private import version_of

NEEDS = "pip install 'forge-models[fla]', or set kernel = 'torch'"
ERRORS = {torch.float32: 0.01, torch.bfloat16: 0.03, torch.float16: 0.01}
"""Maximum relative error of a kernel in its test, for each dtype. A kernel that is wrong, and does not just round, has errors
near 1."""


class RuleKernel(NamedTuple):
    """A kernel, and the function of plain torch that it replaces.

    Attributes:
        module, function: where flash-linear-attention has it.
        per_channel: whether decays differ by channel.
        delta: whether it applies the delta rule; otherwise values are written as they are.
        torch: the function of plain torch.
    """

    module: str
    function: str
    per_channel: bool
    delta: bool
    torch: Callable[..., tuple[Tensor, Tensor]]


GATED_DELTA = RuleKernel("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", False, True, delta_rule.gated_delta_rule)
CHANNEL_DELTA = RuleKernel("fla.ops.kda", "chunk_kda", True, True, channel_delta.channel_delta_rule)
STATE_SPACE = RuleKernel("fla.ops.simple_gla", "chunk_simple_gla", False, False, state_space.state_space)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, documents: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `blocks.delta_rule.gated_delta_rule`; errors are those of `run`."""
    return run(GATED_DELTA, (q, k, v, g, beta), documents, state)


def channel_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, documents: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `blocks.channel_delta.channel_delta_rule`; errors are those of `run`."""
    return run(CHANNEL_DELTA, (q, k, v, g, beta), documents, state)


def state_space_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    step: Tensor,
    skip: Tensor,
    *,
    documents: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `blocks.state_space.state_space`; errors are those of `run`."""
    return run(STATE_SPACE, (q, k, v, g, step, skip), documents, state)


def run(kernel: RuleKernel, given: Sequence[Tensor], documents: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the outputs (B, T, heads, value width), and the state after the last token of each row.

    Args:
        kernel: which one.
        given: q, k, v, g, beta, as for `gated_delta_rule`; with `STATE_SPACE` also the factors of the skip.
        documents: (B, T) document of each token; see `gated_delta_rule`.
        state: (B, heads, key width, value width) state before the first token; zeros if None.

    Raises:
        ForgeError: there is no kernel for the device or the dtype, flash-linear-attention is not installed, or its kernel has
            failed its test.
    """
    _, k, v, *_ = given
    if type(v) is not Tensor:  # a dry run: no kernel can run, and plain torch has tensors of the same shapes
        return kernel.torch(*given, documents=documents, state=state)
    prove(kernel, v.device, v.dtype, k.shape[2], v.shape[2], k.shape[3], v.shape[3])
    return _apply(kernel, given, documents, state)


def _apply(kernel: RuleKernel, given: Sequence[Tensor], documents: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, *skip = given
    rows, length, heads, width = v.shape
    if kernel.delta:
        values, more = v, {"beta": beta}
    else:  # the kernel has one key for each head, and no steps
        q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
        values, more = (v * beta.unsqueeze(-1)).to(v.dtype), {}
    if state is None:
        state = g.new_zeros(rows, heads, k.shape[-1], width)
    streams = {"q": q.to(v.dtype), "k": k.to(v.dtype), "v": values, "g": g, **more}
    places = None
    if documents is not None:
        places = _sequences(documents)
        streams = {name: x.flatten(0, 1).unsqueeze(0) for name, x in streams.items()}
        state = state.new_zeros(len(places.starts) - 1, *state.shape[1:]).index_copy(0, places.first, state)
    function = getattr(importlib.import_module(kernel.module), kernel.function)
    out, after = function(
        **{name: x.contiguous() for name, x in streams.items()},
        scale=1.0,
        initial_state=state,
        output_final_state=True,
        **({} if places is None else {"cu_seqlens": places.starts}),
    )
    if places is not None:
        after = after[places.last]
    out = out.view(rows, length, heads, width)
    if skip:
        out = out + skip[0].unsqueeze(-1) * v
    return out.to(v.dtype), after


class _Sequences(NamedTuple):
    """The documents of a batch, one after the other.

    Attributes:
        starts: (n + 1,) int32 first token of each document in the flattened batch, and the number of tokens.
        first, last: (B,) int64 number of the first and of the last document of each row.
    """

    starts: Tensor
    first: Tensor
    last: Tensor


_known: "WeakIdKeyDictionary" = WeakIdKeyDictionary()
"""Documents of a batch, which the layers of a model and recomputation share -> their version and `_Sequences`."""


def _sequences(documents: Tensor) -> _Sequences:
    known: tuple[object, _Sequences] | None = _known.get(documents)
    if known is not None and known[0] == version_of(documents):  # otherwise another batch has overwritten them
        return known[1]
    borders = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    starts = F.pad(borders.flatten().nonzero().squeeze(1), (0, 1), value=documents.numel())
    ends = borders.sum(1).cumsum(0)
    places = _Sequences(starts.int(), F.pad(ends[:-1], (1, 0)), ends - 1)
    _known[documents] = version_of(documents), places
    return places


@cache
def prove(
    kernel: RuleKernel, device: torch.device, dtype: torch.dtype, key_heads: int, heads: int, key_width: int, value_width: int
) -> None:
    """Tests a kernel on the device, once for each dtype, number of heads and width.

    Raises:
        ForgeError: see `run`.
    """
    if dtype not in ERRORS:
        raise ForgeError(f"kernel = 'fla' computes in bf16, fp16 or fp32, not in {dtype}; set kernel = 'torch'")
    if not is_nvidia(device) and os.environ.get("TRITON_INTERPRET") != "1":
        raise ForgeError(f"kernel = 'fla' needs a CUDA device, and this is {device}; set kernel = 'torch'")
    try:
        importlib.import_module(kernel.module)
    except ImportError as error:
        raise ForgeError(f"kernel = 'fla' needs flash-linear-attention ({error}): {NEEDS}") from error
    with ThreadPoolExecutor(1) as thread:  # without the modes of the caller: recomputation would count the tensors of the test
        worst, what = thread.submit(_error, kernel, device, dtype, key_heads, heads, key_width, value_width).result()
    if worst > ERRORS[dtype]:
        raise ForgeError(
            f"{kernel.function} of flash-linear-attention gives other numbers than plain torch here: in {dtype}, with heads of "
            f"{key_width} and {value_width}, the relative error of {what} is {worst:.2g}, and {ERRORS[dtype]} is the limit; "
            "set kernel = 'torch', or try another release of flash-linear-attention or of Triton"
        )


def _error(
    kernel: RuleKernel, device: torch.device, dtype: torch.dtype, key_heads: int, heads: int, key_width: int, value_width: int
) -> tuple[float, str]:
    """Returns the largest relative error of a value or gradient of the kernel, infinite for NaN, and its name."""
    draw, rows, length = torch.Generator().manual_seed(0), 2, 2 * CHUNK + 5

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    q, k = (F.normalize(normal(rows, length, key_heads, key_width), dim=-1) for _ in range(2))
    v, beta = normal(rows, length, heads, value_width), normal(rows, length, heads).sigmoid()
    g = -normal(rows, length, heads, *((key_width,) if kernel.per_channel else ())).abs()
    state = normal(rows, heads, key_width, value_width)
    inputs = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "g": g.float(), "beta": beta.float()}
    inputs |= {} if kernel.delta else {"skip": normal(heads).float()}
    inputs["state"] = state.float()
    weights = normal(*v.shape).to(dtype).double(), normal(*state.shape)
    packed = torch.zeros(rows, length, dtype=torch.int64, device=device)
    packed[0, CHUNK // 2 :] = 1  # a border within a chunk, and a row of one document

    def results(documents: Tensor | None, exact: bool) -> list[Tensor]:
        made = [x.to(device, torch.float64 if exact else x.dtype).requires_grad_() for x in inputs.values()]
        if exact:
            out, after = kernel.torch(*made[:-1], documents=documents, state=made[-1])
        else:
            out, after = _apply(kernel, made[:-1], documents, made[-1])
        total = (out.double() * weights[0].to(device)).sum() + (after.double() * weights[1].to(device)).sum()
        return [out, after, *torch.autograd.grad(total, made)]

    names = "the output", "the state", *(f"the gradient of {name}" for name in inputs)
    worst, what = 0.0, names[0]
    with current(device):
        for documents in (packed, None):
            for name, found, expected in zip(names, results(documents, False), results(documents, True), strict=True):
                error = ((found.double() - expected).norm() / expected.norm()).item()
                if (error := inf if isnan(error) else error) > worst:
                    worst, what = error, name
    return worst, what
