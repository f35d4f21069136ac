"""Names of torch that its documentation does not promise to keep: each here once, with the reason.

Where torch may drop a name, a fallback follows. What takes long to import, or acts when it is imported, is behind a function.
Tests call all of them.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from importlib.metadata import requires
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.nn.utils import parametrizations

# Walks all that can hold tensors, as torch's own hooks see it; torch has no public module for Python.
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

# To see every operator. Documented for tools such as profilers, under this private path only.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # isort: skip

# Tensors without memory, that a dry run computes on.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # isort: skip
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # isort: skip
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily  # isort: skip
from torch._guards import detect_fake_mode as detect_fake_mode  # isort: skip

# The halves of a backward, for stages whose slots do not hold the parameters themselves.
from torch.distributed.pipelining._backward import stage_backward_input as stage_backward_input  # isort: skip
from torch.distributed.pipelining._backward import stage_backward_weight as stage_backward_weight  # isort: skip

try:  # what FSDP makes of a dimension that tensor parallelism has cut; torch means to do without it
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
except ImportError:

    class StridedShard:  # type: ignore[no-redef]
        """Nothing is one."""

        dim: int


aten = torch.ops.aten

# A group by its name, as operators are given it.
resolve_process_group: Callable[[str], dist.ProcessGroup] = distributed_c10d._resolve_process_group  # type: ignore[assignment]

# Collectives that a compiler can trace; the public functions return tensors that are still on their way.
functional = torch.ops._c10d_functional

# Attention of a CPU with its log-sum-exp, and the backward that takes one.
flash_attention_cpu = aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward

# Attention of CUDA, of which a dry run asks the shapes: by the kernel of cuDNN, and written out.
attention_cudnn = aten._scaled_dot_product_cudnn_attention
attention_math = aten._scaled_dot_product_attention_math

# Operators that wrappers of tensors have to know by name.
TO_COPY = aten._to_copy.default
LOCAL_SCALAR = aten._local_scalar_dense.default
GROUPED_MM = aten._grouped_mm.default

# Whether a profiler records this thread; the public ways cost more than a step can spare.
profiling: Callable[[], bool] = torch.autograd._profiler_enabled

# One kernel for many tensors.
foreach_norm: Callable[..., Sequence[Tensor]] = torch._foreach_norm
foreach_mul_: Callable[..., None] = torch._foreach_mul_

# A float8 product of several matrices at once; torchao calls it under the same name.
scaled_grouped_mm: Callable[..., Tensor] = torch._scaled_grouped_mm

# For classes of tensors, and for code that looks at functions of torch from inside one.
DisableTorchFunction: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]

# What `load_state_dict` returns.
IncompatibleKeys = nn.modules.module._IncompatibleKeys

# Families of modules.
BatchNorm = nn.modules.batchnorm._NormBase


def mark_as_partial(parameters: Iterable[Tensor], refusal: Exception) -> None:
    """Lets torch's `clip_grad_norm_` raise `refusal` for these parameters, whose gradients are a part of what the norm is of.

    torch has no hook for it. Whatever road a loop takes to it, it scales gradients by one function of its module, which is looked
    up at each call; that one is wrapped once for the process.
    """
    from torch.nn.utils import clip_grad

    for parameter in parameters:
        parameter.partial_norm = refusal  # type: ignore[attr-defined]
    scale = clip_grad._clip_grads_with_norm_
    if hasattr(scale, "refuses"):
        return

    def checked(parameters: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for parameter in parameters:
            if (refusal := getattr(parameter, "partial_norm", None)) is not None:
                raise refusal
        scale(parameters, *args, **kwargs)

    checked.refuses = True  # type: ignore[attr-defined]
    clip_grad._clip_grads_with_norm_ = checked


@contextmanager
def recording() -> Iterator[None]:
    """Gradients are recorded inside, even in the body of an operator, where torch has switched autograd off by its keys."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():  # type: ignore[call-arg]
        yield


def schema(func: Any) -> Any:
    """Name, arguments and results of an operator."""
    return func._schema


def storage_key(storage: torch.UntypedStorage) -> int:
    """What tells storages apart while they live; those without memory have no address."""
    return storage._cdata


def is_view(tensor: Tensor) -> bool:
    """Whether autograd sees it as a view, which may not be detached in place."""
    return tensor._is_view()


def is_orthogonal(parametrization: nn.Module) -> bool:
    """Whether it is what `torch.nn.utils.parametrizations.orthogonal` registers, which has no operators for bf16."""
    return isinstance(parametrization, parametrizations._Orthogonal)


def base_of(tensor: Tensor) -> Tensor | None:
    """What autograd sees a tensor as a view of."""
    return tensor._base


def local_part(tensor: Any) -> Any:
    """What a rank holds of a DTensor, with its class and storage; `to_local` gives another tensor."""
    return tensor._local_tensor


def float8_numbers(cast: Any) -> Tensor:
    """The numbers of a tensor of torchao without their scale."""
    return cast._data


def python_body(func: Any) -> Callable[..., Any] | None:
    """The function behind an operator that is written in Python; None for others, and where torch does not tell."""
    try:
        from torch._library.custom_ops import _maybe_get_opdef
    except ImportError:
        return None
    written = _maybe_get_opdef(func)
    return None if written is None else written._init_fn


def before_backward(module: Any) -> Callable[[Tensor], Any]:
    """A hook for gradients that gathers a module which FSDP has sharded."""
    return module._get_fsdp_state()._pre_backward


def expect_views_from_units() -> None:
    """Keeps FSDP from warning of units that return views: what these are views of has `before_backward`, too."""
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor", UserWarning)


def after_backward(module: Any) -> None:
    """Moves gradients of gathered parameters to where FSDP sums them. From torch 2.12 on a module has several groups."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
        group.post_backward()


def end_forward(module: Any) -> None:
    """Lets FSDP know that no forward of a module is under way: after an error it believes that one is, and frees nothing."""
    state = module._get_fsdp_state()
    for each in (state, *(getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]))):
        if each._training_state.name == "FORWARD":
            each._training_state = type(each._training_state).IDLE


def in_backward() -> bool:
    """Whether this thread runs a backward, as a recomputed forward does."""
    return torch._C._current_graph_task_id() != -1


def look_at_parameters_again(module: Any) -> None:
    """Lets FSDP find out anew which parameters of a module take a gradient: it has noted in which format it reduces theirs when
    it first ran. The public way gathers them."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
        if group._reset_sharded_params:  # else it has not run
            group.lazy_init()


def forget_meshes() -> None:
    """Empties DTensor's caches, which hold meshes of groups that are gone."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def fake_store() -> Any:
    """The store of a group whose collectives move nothing; importing it registers the backend `fake`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def within_budget(share: float) -> AbstractContextManager[Any]:
    """Inside, the compiler keeps at most this share of the activations; it has no argument for it."""
    import torch._functorch.config as functorch

    return functorch.patch(activation_memory_budget=share)


def overlap_tensor_parallelism(group: dist.ProcessGroup) -> None:
    """Lets the compiler fuse collectives over `group` with matrix products. The switch is that of the whole process."""
    import torch._inductor.config as inductor
    from torch.distributed import _symmetric_memory

    if (enable := getattr(_symmetric_memory, "enable_symm_mem_for_group", None)) is not None:
        with warnings.catch_warnings():  # newer versions of torch need it no more, and say so
            warnings.simplefilter("ignore", FutureWarning)
            enable(group.group_name)
    inductor._micro_pipeline_tp = True


def set_timeouts(limit: timedelta, groups: Iterable[dist.ProcessGroup] | None = None) -> None:
    """Of these groups, by default every group of this process. The public way is to open a group with it; those of a mesh cannot
    be given one at all."""
    change = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # public since torch 2.14
    for group in list(distributed_c10d._world.pg_map if groups is None else groups):
        change(limit, group)


def record_allocations(memory: Any, entries: int | None) -> None:
    """Notes what an allocator does from here on, the last so many events; None ends it. torch documents it under this name only.

    Args:
        memory: the module `memory` of a kind of devices.
    """
    if entries is None:
        memory._record_memory_history(enabled=None)
    else:
        memory._record_memory_history(max_entries=entries)


def write_allocations(memory: Any, path: str) -> None:
    """Writes what was noted, for pytorch.org/memory_viz."""
    memory._dump_snapshot(path)


def notes_allocations(memory: Any) -> bool:
    """Whether devices of this kind can."""
    return hasattr(memory, "_record_memory_history") and hasattr(memory, "_dump_snapshot")


def limit_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """After how long a collective on tensors of `device` is an error; None where the backend has no such limit."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def default_store() -> dist.Store:
    """The store of the default process group; torch has no public name for it."""
    return distributed_c10d._get_default_store()


@contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Groups of gloo that are opened inside carry out their collectives in one thread. torch gives them two, and no argument to
    say otherwise.

    With two, the heap breaks: each notes the name of what it has finished in one string of the group, without a lock
    (`ProcessGroupGloo::runLoop` of torch 2.13). Names of more than 15 letters are on the heap, and that of
    functional all-gathers is one, as DTensor calls them. docs/adr/0036.
    """
    plain = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if plain is None:  # a torch without gloo
        yield
        return

    class OneThread(plain):  # type: ignore[misc, valid-type]  # a base that is looked up, as there may be none
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **settings: Any) -> None:
            options = plain._Options()
            options._timeout, options._threads = timeout, 1
            for name, value in settings.items():  # torch 2.14 passes `enable_reconfigure`, a later one may pass more
                if not hasattr(options, name):
                    tested = next(line for line in requires("forge-parallel") or () if line.startswith("torch"))
                    raise RuntimeError(
                        f"torch {torch.__version__} opens gloo groups with {name}={value!r}, which this Forge does not know; "
                        f"install a torch that it was tested with: pip install '{tested}'"
                    )
                setattr(options, name, value)
            named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options._devices = [plain.create_device(interface=name) for name in named] or [plain.create_default_device()]
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneThread
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = plain


def gloo_threads(group: dist.ProcessGroup) -> int:
    """How many threads carry out the collectives of a group on tensors of the host; 0 where gloo does not."""
    try:
        options = group._get_backend(torch.device("cpu")).options
    except (AttributeError, RuntimeError):  # such as a backend of one device only, or that of a dry run
        return 0
    return getattr(options, "_threads", 0)


def flight_record() -> list[dict[str, Any]]:
    """What torch's flight recorders have noted of this process' collectives, oldest first; empty where they note nothing."""
    found = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            found += json.loads(dump(True, False)).get("entries", ())
    return found
