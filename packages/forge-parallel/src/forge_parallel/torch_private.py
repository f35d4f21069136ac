"""Names of torch that its documentation does not promise to keep: each is used only here, with the reason.

If torch may drop a name, there is a fallback. Modules that are slow to import, or have side effects, are imported in functions.
Tests call all of these names.
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

# Iterate over everything that may contain tensors, as torch's own hooks do; torch has no public module for this in Python.
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

# To intercept every operator. Documented for tools such as profilers, but only under this private path.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # isort: skip

# Fake tensors, on which a dry run computes.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # isort: skip
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # isort: skip
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily  # isort: skip
from torch._guards import detect_fake_mode as detect_fake_mode  # isort: skip

try:  # FSDP's placement of a dimension that tensor parallelism has sharded before; torch plans to remove it
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
except ImportError:

    class StridedShard:  # type: ignore[no-redef]
        """No placement is an instance of this class."""

        dim: int


aten = torch.ops.aten

# Returns a group by its name, as operators receive it.
resolve_process_group: Callable[[str], dist.ProcessGroup] = distributed_c10d._resolve_process_group  # type: ignore[assignment]

# Collectives that a compiler can trace; the public functions return asynchronous tensors.
functional = torch.ops._c10d_functional

# Attention on a CPU with its log-sum-exp, and the backward that takes one.
flash_attention_cpu = aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward

# Attention on CUDA, whose shapes a dry run needs: with cuDNN's kernel, and with materialized scores.
attention_cudnn = aten._scaled_dot_product_cudnn_attention
attention_math = aten._scaled_dot_product_attention_math

# Operators that wrappers of tensors compare by identity.
TO_COPY = aten._to_copy.default
LOCAL_SCALAR = aten._local_scalar_dense.default
GROUPED_MM = aten._grouped_mm.default
WAIT_TENSOR = functional.wait_tensor.default

# Whether a profiler records this thread; public functions are too slow for a step.
profiling: Callable[[], bool] = torch.autograd._profiler_enabled

# One kernel for many tensors.
foreach_norm: Callable[..., Sequence[Tensor]] = torch._foreach_norm
foreach_mul_: Callable[..., None] = torch._foreach_mul_

# A grouped float8 product; torchao uses the same name.
scaled_grouped_mm: Callable[..., Tensor] = torch._scaled_grouped_mm

# For tensor subclasses, and for code that intercepts functions of torch.
DisableTorchFunction: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` is the result of `torch.compile`, or its call is compiled in place. torch has no public name for this."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


# The result of `load_state_dict`.
IncompatibleKeys = nn.modules.module._IncompatibleKeys

# Base classes of families of modules.
BatchNorm = nn.modules.batchnorm._NormBase


def mark_as_partial(parameters: Iterable[Tensor], refusal: Exception) -> None:
    """Makes torch's `clip_grad_norm_` raise `refusal` for these parameters, whose gradients are only a part of the whole.

    torch has no hook for this. All public functions scale gradients with one function of the module, which is looked up at each
    call; that function is wrapped once per process.
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
    """Context in which gradients are recorded, even in the body of an operator, where torch has disabled autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():  # type: ignore[call-arg]
        yield


def schema(func: Any) -> Any:
    """Returns the schema of an operator: its name, arguments and results."""
    return func._schema


def storage_key(storage: torch.UntypedStorage) -> int:
    """Returns a key that identifies a storage while it is alive; fake storages have no address."""
    return storage._cdata


def not_persistent(module: nn.Module) -> frozenset[str]:
    """Returns the names of a module's own buffers that its state does not have."""
    return frozenset(module._non_persistent_buffers_set)


def is_view(tensor: Tensor) -> bool:
    """Whether autograd treats a tensor as a view, which cannot be detached in place."""
    return tensor._is_view()


def is_orthogonal(parametrization: nn.Module) -> bool:
    """Whether the parametrization is that of `torch.nn.utils.parametrizations.orthogonal`, which does not support bf16."""
    return isinstance(parametrization, parametrizations._Orthogonal)


def base_of(tensor: Tensor) -> Tensor | None:
    """Returns the tensor of which autograd treats `tensor` as a view; None if there is none."""
    return tensor._base


def local_part(tensor: Any) -> Any:
    """Returns a rank's part of a DTensor, with its class and storage; `to_local` returns another tensor."""
    return tensor._local_tensor


def float8_numbers(cast: Any) -> Tensor:
    """Returns the numbers of a torchao float8 tensor, without the scale."""
    return cast._data


def python_body(func: Any) -> Callable[..., Any] | None:
    """Returns the function of an operator that is written in Python; None for other operators, and if torch does not provide
    it."""
    try:
        from torch._library.custom_ops import _maybe_get_opdef
    except ImportError:
        return None
    written = _maybe_get_opdef(func)
    return None if written is None else written._init_fn


def before_backward(module: Any) -> Callable[[Tensor], Any]:
    """Returns a gradient hook that gathers a module sharded by FSDP."""
    return module._get_fsdp_state()._pre_backward


def expect_views_from_units() -> None:
    """Silences FSDP's warning about units that return views, since the bases of these views have `before_backward` as well."""
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor", UserWarning)


def after_backward(module: Any) -> None:
    """Moves gradients of gathered parameters to where FSDP sums them. From torch 2.12 on, a module has several groups."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
        group.post_backward()


def end_forward(module: Any) -> None:
    """Tells FSDP that no forward of a module is running; after an error it would assume one, and free nothing."""
    state = module._get_fsdp_state()
    for each in (state, *(getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]))):
        if each._training_state.name == "FORWARD":
            each._training_state = type(each._training_state).IDLE


def in_backward() -> bool:
    """Whether this thread runs a backward, for example a recomputed forward."""
    return torch._C._current_graph_task_id() != -1


def look_at_parameters_again(module: Any) -> None:
    """Makes FSDP check again which parameters of a module require gradients, because it chose their reduction dtype when it first
    ran. The public method would gather the parameters."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
        if group._reset_sharded_params:  # otherwise it has not run yet
            group.lazy_init()


@contextmanager
def around_shapes(around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Context in which DTensor enters `around()` while it computes the global shapes of results, by running the operator on fake
    tensors. It caches them, but torch 2.11 computes those of a fused optimizer in every step."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    def computed(*args: Any, **kwargs: Any) -> Any:
        with around():
            return original(*args, **kwargs)

    setattr(ShardingPropagator, name, computed)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, original)


def forget_meshes() -> None:
    """Empties DTensor's caches, which hold meshes of destroyed groups."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def fake_store() -> Any:
    """Returns the store of a group whose collectives move nothing; the import registers the backend `fake`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def within_budget(share: float) -> AbstractContextManager[Any]:
    """Context in which the compiler saves at most this share of activations; it has no argument for this."""
    import torch._functorch.config as functorch

    return functorch.patch(activation_memory_budget=share)


def overlap_tensor_parallelism(group: dist.ProcessGroup) -> None:
    """Lets the compiler fuse collectives over `group` with matrix products. The setting applies to the whole process."""
    import torch._inductor.config as inductor
    from torch.distributed import _symmetric_memory

    if (enable := getattr(_symmetric_memory, "enable_symm_mem_for_group", None)) is not None:
        with warnings.catch_warnings():  # newer versions of torch do not need this call and warn about it
            warnings.simplefilter("ignore", FutureWarning)
            enable(group.group_name)
    inductor._micro_pipeline_tp = True


def set_timeouts(limit: timedelta, groups: Iterable[dist.ProcessGroup] | None = None) -> None:
    """Sets the timeout of these groups, by default of all groups of this process. Publicly, a timeout can only be given when a
    group is created, and not for groups of a mesh."""
    change = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # public since torch 2.14
    for group in list(distributed_c10d._world.pg_map if groups is None else groups):
        change(limit, group)


def record_allocations(memory: Any, entries: int | None) -> None:
    """Records the last `entries` events of an allocator from here on; None stops recording. torch documents only this name.

    Args:
        memory: the `memory` module of a kind of device.
    """
    if entries is None:
        memory._record_memory_history(enabled=None)
    else:
        memory._record_memory_history(max_entries=entries)


def write_allocations(memory: Any, path: str) -> None:
    """Writes the recorded events for pytorch.org/memory_viz."""
    memory._dump_snapshot(path)


def notes_allocations(memory: Any) -> bool:
    """Whether this kind of device supports `record_allocations` and `write_allocations`."""
    return hasattr(memory, "_record_memory_history") and hasattr(memory, "_dump_snapshot")


def limit_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Returns the timeout of a group's collectives on tensors of `device`; None if the backend has none."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def default_store() -> dist.Store:
    """Returns the store of the default process group; torch has no public function for it."""
    return distributed_c10d._get_default_store()


def store_with(key: str) -> dist.Store | None:
    """Returns the store that has a key: that of the default process group, or one that torch made it from; None without one."""
    store = default_store()
    while not store.check([key]):
        if not isinstance(store, dist.PrefixStore):
            return None
        store = store.underlying_store
    return store


@contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Context in which gloo groups are created with one thread for their collectives. torch's default is two, without an option.

    With two threads, the heap is corrupted: each writes the name of its last collective to the same string of the group without a
    lock (`ProcessGroupGloo::runLoop` of torch 2.13). Names of more than 15 characters are on the heap, such as that of DTensor's
    functional all-gather. See docs/adr/0036.
    """
    plain = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if plain is None:  # a torch without gloo
        yield
        return

    class OneThread(plain):  # type: ignore[misc, valid-type]  # the base class is looked up, because it may not exist
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **settings: Any) -> None:
            options = plain._Options()
            options._timeout, options._threads = timeout, 1
            for name, value in settings.items():  # torch 2.14 passes `enable_reconfigure`, a later one may pass more
                if not hasattr(options, name):
                    tested = next(line for line in requires("forge-parallel") or () if line.startswith("torch"))
                    raise RuntimeError(
                        f"torch {torch.__version__} opens gloo groups with {name}={value!r}, which this Forge does not support; "
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
    """Returns the number of threads for a group's collectives on host tensors; 0 if it does not use gloo."""
    try:
        options = group._get_backend(torch.device("cpu")).options
    except (AttributeError, RuntimeError):  # for example a backend for one device only, or that of a dry run
        return 0
    return getattr(options, "_threads", 0)


def flight_record() -> list[dict[str, Any]]:
    """Returns the records of torch's flight recorders about this process's collectives, oldest first; empty if there are none."""
    entries = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            entries += json.loads(dump(True, False)).get("entries", ())
    return entries


def stage_backward_input(*arguments: Any) -> Any:
    """Runs the first half of a backward, for stages whose slots do not hold the parameters themselves."""
    from torch.distributed.pipelining import _backward  # imports torch's compiler, which other runs can do without

    return _backward.stage_backward_input(*arguments)


def stage_backward_weight(*arguments: Any) -> Any:
    """Runs the second half of a backward."""
    from torch.distributed.pipelining import _backward

    return _backward.stage_backward_weight(*arguments)
