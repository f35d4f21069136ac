"""What a class of causal language models of transformers consists of, measured with its own code.

A class is built on the meta device. What Forge has to know of it is measured, not assumed: `Anatomy.of` runs the class's own
forward with numbers in place of hidden states and logits, and sees what it does with them; `chain_of` does the same with the
blocks, before a pipeline splits them; `initial_values` records what the class's own initialization writes.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.specs import Init
from forge_models.hf.config import Unsupported
from forge_models.torch_private import TorchDispatchMode

EXPERTS = "forge"
"""Name of the function for stacked experts that built models use; `causal_lm` registers it with transformers."""


def read_settings(config: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a configuration with `settings` in place of its own.

    Raises:
        Unsupported: a key of `settings` is not in the configuration.
    """
    values = json.loads(config)
    text = values.get("text_config") if isinstance(values.get("text_config"), dict) else None
    for key, value in settings.items():
        place = values if key in values or text is None else text
        if key not in place:
            raise Unsupported(f"model.settings.{key} is not a key of config.json; keys are {', '.join(sorted(values))}")
        place[key] = value
    return values


@dataclass(frozen=True)
class AutoClass:
    """What the classes of an Auto class do.

    Attributes:
        loader: name of the Auto class.
        mapping: name of its table of classes.
        what: text for messages.
    """

    loader: str
    mapping: str
    what: str


CAUSAL_LM = AutoClass("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", "causal language model")


def built(values: Mapping[str, Any], task: AutoClass = CAUSAL_LM) -> Any:
    """Returns the module of a configuration on the meta device, as transformers builds it for a task.

    Raises:
        Unsupported: transformers does not know the model, or cannot build it; or the folder needs its own code.
    """
    import transformers

    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        code = " and the code that auto_map names is never run" if values.get("auto_map") else ""
        raise Unsupported(
            f"model_type {kind!r} is not known to transformers {transformers.__version__}{code}; install a version that has it"
        )
    config = transformers.CONFIG_MAPPING[kind].from_dict(dict(values))
    if type(config) not in getattr(transformers, task.mapping):
        raise Unsupported(f"model_type {kind!r} has no {task.what} in transformers {transformers.__version__}")
    _refuse_settings(config)
    config.use_cache = False
    text = config.get_text_config()
    text.use_cache = False
    attention, loader = "sdpa", getattr(transformers, task.loader)
    with torch.device("meta"):
        try:
            module = loader.from_config(config, attn_implementation=attention)
        except ValueError:  # classes without SDPA
            attention = "eager"
            module = loader.from_config(config, attn_implementation=attention)
        except Exception as cause:
            raise Unsupported(
                f"transformers cannot build {kind!r} on the meta device: {type(cause).__name__}: {cause}"
            ) from cause
    _to_meta(module)
    _refuse_batch_dependent(module)
    for part in module.modules():
        if (own := getattr(part, "config", None)) is not None:
            own._experts_implementation = EXPERTS
    return module.train()


def _to_meta(module: nn.Module) -> None:
    """Moves parameters that a constructor created in memory to the meta device."""
    for part in module.modules():
        for slot, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                part._parameters[slot] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)


def _refuse_settings(config: Any) -> None:
    """Refuses settings with which a training step would not be what the user expects.

    Raises:
        Unsupported: weights are quantized, routers have a loss of their own, or dropout or noise is on.
    """
    text = config.get_text_config()
    if getattr(config, "quantization_config", None) is not None:
        raise Unsupported("config.json has a quantization_config, and quantized weights are not trained; convert them to bf16")
    if getattr(text, "output_router_logits", False):
        raise Unsupported(
            "config.json asks for router losses (output_router_logits), which Forge does not add for this class; "
            "set model.settings.output_router_logits = false, or use a family with [model.moe.losses]"
        )
    random = sorted(key for key, value in text.to_dict().items() if ("drop" in key or "jitter" in key) and _positive(value))
    if random:
        keys = ", ".join(f"{key} = 0.0" for key in random)
        raise Unsupported(f"dropout and noise would differ between layouts; set model.settings = {{ {keys} }}")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _refuse_batch_dependent(module: nn.Module) -> None:
    """Refuses rotary embeddings that change with the length of a batch.

    Raises:
        Unsupported: names the module.
    """
    for path, part in module.named_modules():
        kinds = getattr(part, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in ("dynamic", "longrope"):
                raise Unsupported(
                    f"{path}: rotary embeddings of type {kind!r} depend on the longest row of a batch, so that layouts would "
                    "differ; use a configuration with another rope_type"
                )


def keep_constants(module: Any) -> None:
    """Turns buffers that are not saved, such as rotary frequencies, into attributes with values.

    Such buffers are no state: they follow from the configuration. transformers computes them in `_init_weights`.

    Raises:
        Unsupported: a value is not defined there.
    """
    saved = module.state_dict().keys()
    for path, part in module.named_modules():
        named = {slot: f"{path}.{slot}".removeprefix(".") for slot, buffer in part._buffers.items() if buffer is not None}
        slots = [slot for slot, name in named.items() if name not in saved]
        if not slots:
            continue
        kept = dict(part._buffers)
        drawn = []
        for filler in (1, 3):
            for slot in slots:
                part._buffers[slot] = torch.full_like(kept[slot], filler, device="cpu")
            with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                _owner(module, path)._init_weights(part)
            drawn.append({slot: part._buffers[slot] for slot in slots})
        for slot in slots:
            one, other = drawn[0][slot], drawn[1][slot]
            if one.is_meta or not torch.equal(one, other):
                raise Unsupported(
                    f"{type(module).__name__} computes {path}.{slot} in its constructor only, where Forge cannot read it; "
                    "use a family that Forge implements, or another version of transformers"
                )
            delattr(part, slot)
            part.__dict__[slot] = other


def _owner(module: Any, path: str) -> Any:
    """Returns the innermost model of transformers that contains the module at `path`."""
    owner, part = module, module
    for name in path.split(".") if path else ():
        part = getattr(part, name)
        owner = part if hasattr(part, "_init_weights") else owner
    return owner


class _Writes(TorchDispatchMode):
    """Records what is written into whole tensors on the meta device: normal numbers, or one number."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.found: dict[str, Init | str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs and records an operator."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], Tensor):
            tensor = args[0]
            known = self._names.get(id(tensor)) or self._names.get(id(tensor._base))
            if known is not None and tensor.numel() == (tensor if tensor._base is None else tensor._base).numel():
                self.found[known] = _written(name, args[1:], kwargs)
        return func(*args, **kwargs)


def _written(name: str, args: Any, kwargs: Mapping[str, Any]) -> Init | str:
    """Returns the initial value that an operator writes; its name if a spec cannot express it."""
    numbers = [*args, *kwargs.values()]
    if name == "normal_":
        mean = kwargs.get("mean", args[0] if args else 0.0)
        std = kwargs.get("std", args[1] if len(args) > 1 else 1.0)
        return Init("normal", std) if mean == 0 and std > 0 else name
    value = 0.0 if name == "zero_" else numbers[0] if name == "fill_" and numbers else None
    return Init("zeros") if value == 0 else Init("ones") if value == 1 else name


def initial_values(module: Any) -> dict[str, Init | str]:
    """Returns the initial value of each parameter and saved buffer as the class defines it; a text where specs have no word."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    writes = _Writes({id(tensor): name for name, tensor in tensors.items()})
    for part in module.modules():
        part.__dict__.pop("_is_hf_initialized", None)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad(), writes:
        try:
            module.initialize_weights()
        except Exception as cause:  # noqa: BLE001 (the code of any class)
            why = f"{type(cause).__name__} in _init_weights"
            return {name: writes.found.get(name, why) for name in tensors}
    return {name: writes.found.get(name, "nothing") for name in tensors}


class Given:
    """The output of a body with given hidden states; everything else in it is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None


@contextmanager
def replaced(*forwards: tuple[nn.Module, Any]) -> Iterator[None]:
    """Context in which modules have another forward."""
    try:
        for part, forward in forwards:
            part.__dict__["forward"] = forward
        yield
    finally:
        for part, _ in forwards:
            part.__dict__.pop("forward", None)


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model, by path.

    Attributes:
        body: what computes the hidden states; "" if the class is not a body and a rest.
        embed: table of token embeddings; "" if there is none of torch's class.
        blocks: the repeated blocks, in order.
        head: projection to the vocabulary; "" if the loss needs whole logits.
        rest: modules behind the body, which compute whole logits; empty with a head.
        scale: factor on the logits.
        soft_cap: logits become soft_cap * tanh(logits / soft_cap).
        width: size of the hidden states behind the body; 0 without a body.
        why_whole: why the loss needs whole logits.
    """

    body: str
    embed: str
    blocks: tuple[str, ...]
    head: str
    rest: tuple[str, ...]
    scale: float
    soft_cap: float | None
    width: int
    why_whole: str

    @classmethod
    def of(cls, module: Any) -> "Anatomy":
        """Looks at a model on the meta device.

        Raises:
            Unsupported: it has no list of blocks.
        """
        paths = {id(part): path for path, part in module.named_modules()}
        head, embed, name = module.get_output_embeddings(), module.get_input_embeddings(), type(module).__name__
        lists = [
            (path, part)
            for path, part in module.named_modules()
            if isinstance(part, nn.ModuleList) and not any(isinstance(one, nn.ModuleList) for one in _around(module, path))
        ]
        if not lists:
            raise Unsupported(f"{name} has no list of blocks")
        path, blocks = max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))
        base = module.base_model
        bodies = [base, getattr(base, "decoder", None), module.get_submodule(path.partition(".")[0])]
        body, rest, width, scale, soft_cap, why = None, (), 0, 1.0, None, ""
        for candidate in bodies:
            try:
                ratio, scale, soft_cap = head_of(module, candidate, head)
            except Unsupported as cause:
                why = why or str(cause)
            else:
                body, width, scale, why = candidate, head.in_features, _exact(ratio) * _exact(scale), ""
                break
        for candidate in bodies if why else ():
            try:
                rest, width = _rest_of(module, candidate)
            except Unsupported:
                continue
            body = candidate
            break
        return cls(
            body="" if body is None else paths[id(body)],
            embed=paths.get(id(embed), "") if isinstance(embed, nn.Embedding) else "",
            blocks=tuple(f"{path}.{index}" for index in range(len(blocks))),
            head="" if why else paths[id(head)],
            rest=rest,
            scale=scale,
            soft_cap=soft_cap,
            width=width,
            why_whole=why,
        )

    @property
    def behind(self) -> tuple[str, ...]:
        """Paths of the modules behind the body."""
        return (self.head,) if self.head else self.rest


def _around(module: nn.Module, path: str) -> Iterator[nn.Module]:
    while path := path.rpartition(".")[0]:
        yield module.get_submodule(path)


def head_of(module: Any, base: Any, head: Any, embedded: bool = False) -> tuple[float, float, float | None]:
    """Returns factors on hidden states and on logits, and the cap of logits, from the class's own forward on given numbers.

    Args:
        module: the model.
        base: what computes the hidden states.
        head: projection to the vocabulary.
        embedded: whether `base` gets embeddings, which the model makes outside of it.

    Raises:
        Unsupported: the model is not a body and a linear output layer without a bias, the output layer does not get the hidden
            states of the body, or the logits become something else.
    """
    name, parts = type(module).__name__, set(map(id, module.modules()))
    if not isinstance(base, nn.Module) or base is module or id(base) not in parts:
        raise Unsupported(f"{name} is not a body with a head")
    if not isinstance(head, nn.Linear) or id(head) not in parts:
        raise Unsupported(f"{name} has no linear output layer")
    if type(head).forward is not nn.Linear.forward:  # Dory scales the logit of each token there
        raise Unsupported(f"the output layer of {name} is more than a linear layer")
    if head.bias is not None:
        raise Unsupported(f"the output layer of {name} has a bias")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, head.in_features, generator=generator, dtype=torch.float64)
    logits = 9 * torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    seen: list[Any] = []

    def project(x: Any, *_: Any, **__: Any) -> Tensor:
        seen.append(x)
        return logits.clone()

    weight = head._parameters["weight"]
    given = {"inputs_embeds": torch.zeros(2, 3, head.in_features)} if embedded else {}
    given = given or {"input_ids": torch.zeros(2, 3, dtype=torch.int64)}
    with replaced((base, lambda *_, **__: Given(hidden)), (head, project)), torch.no_grad():
        head._parameters["weight"] = nn.Parameter(torch.zeros(1, head.in_features))  # some move hidden states to its device
        try:
            out = module.forward(**given)
        except Exception as cause:
            why = f"{type(cause).__name__}: {cause}"
            raise Unsupported(f"the forward of {name} is not a body followed by its output layer ({why})") from cause
        finally:
            head._parameters["weight"] = weight
    found = getattr(out, "logits", None)
    if len(seen) != 1 or not isinstance(found, Tensor) or found.shape != logits.shape:
        raise Unsupported(f"{name} does not return the logits of its output layer")
    last = seen[0].double()
    if last.is_meta or last.shape != hidden.shape:
        raise Unsupported(f"{name} computes logits from something else than the hidden states of its body")
    ratio = float((last / hidden).mean())
    if not torch.allclose(last, ratio * hidden, rtol=1e-6, atol=0):
        raise Unsupported(f"{name} changes the hidden states of its body before the output layer")
    found = found.double()
    cap = getattr(module.config.get_text_config(), "final_logit_softcapping", None)
    if cap is not None:
        inner = cap * (found / cap).clamp(-0.999, 0.999).atanh()
        scale = float((inner / logits).median())
        if torch.allclose(found, cap * (scale * logits / cap).tanh(), rtol=1e-5, atol=1e-5):
            return ratio, scale, float(cap)
    scale = float((found / logits).mean())
    if not torch.allclose(found, scale * logits, rtol=1e-6, atol=0):
        raise Unsupported(f"{name} changes the logits of its output layer by more than a factor or a soft cap")
    return ratio, scale, None


def _rest_of(module: Any, base: Any) -> tuple[tuple[str, ...], int]:
    """Returns the modules with parameters that compute logits from the hidden states of a body, and the width of these.

    Raises:
        Unsupported: logits do not follow from the hidden states and these modules alone.
    """
    name = type(module).__name__
    if not isinstance(base, nn.Module) or base is module or id(base) not in set(map(id, module.modules())):
        raise Unsupported(f"{name} is not a body with a head")
    if any(parameter is not None for parameter in module._parameters.values()):
        raise Unsupported(f"{name} has parameters outside of its modules")
    width = module.config.get_text_config().hidden_size
    hidden = torch.empty(2, 3, width, device="meta")
    with replaced((base, lambda *_, **__: Given(hidden))), torch.no_grad():
        try:
            logits = module.forward(input_ids=torch.zeros(2, 3, dtype=torch.int64, device="meta")).logits
        except Exception as cause:
            raise Unsupported(f"{name} does not compute logits from hidden states alone") from cause
    if not isinstance(logits, Tensor) or logits.shape[:2] != (2, 3):
        raise Unsupported(f"{name} does not return logits")
    inside = next(path for path, part in module.named_modules() if part is base)
    outside = [path for path, part in module.named_children() if any(True for _ in part.parameters())]
    if inside not in outside:
        raise Unsupported(f"{name} has its body inside of another module")
    return tuple(path for path in outside if path != inside), width


def _exact(value: float) -> float:
    """Removes the rounding of a mean of equal quotients."""
    return 1.0 if abs(value - 1) < 1e-6 else value


@dataclass(frozen=True)
class Chain:
    """How the units of a body follow each other.

    Attributes:
        entry: paths of the modules before the blocks.
        exit: paths of the modules behind them, without the head.
        returns_tuple: whether blocks return a tuple.
    """

    entry: tuple[str, ...]
    exit: tuple[str, ...]
    returns_tuple: bool


def chain_of(model: Any) -> Chain:
    """Returns how the units of a body follow each other, from the class's own forward with numbers in place of every unit.

    Raises:
        Unsupported: the class computes with hidden states between units, or runs a unit never or twice.
    """
    causes = []
    for returns_tuple in (False, True):
        try:
            return _chain_with(model, returns_tuple)
        except Unsupported as cause:
            causes.append(str(cause))
    raise Unsupported(causes[0])


def _chain_with(model: Any, returns_tuple: bool) -> Chain:
    anatomy, name = model.anatomy, type(model).__name__
    if not anatomy.behind:
        raise Unsupported(f"a pipeline cannot split {name}: {anatomy.why_whole}")
    body: Any = model.get_submodule(anatomy.body)
    units = _units(model)
    calls: list[tuple[str, Any, Tensor]] = []
    generator = torch.Generator().manual_seed(0)

    def stub(path: str) -> Any:
        def forward(x: Any = None, *_: Any, **kwargs: Any) -> Any:
            x = kwargs.get("hidden_states") if x is None else x
            out = torch.randn(2, 4, anatomy.width, generator=generator)
            calls.append((path, x, out))
            return (out,) if returns_tuple and path in anatomy.blocks else out

        return forward

    takes = arguments(type(body))
    off = {"use_cache": False} if "use_cache" in takes else {}
    stubs = [(model.get_submodule(path), stub(path)) for path in units]
    with replaced(*stubs), torch.no_grad():
        try:
            result = body(input_ids=torch.zeros(2, 4, dtype=torch.int64), **off)[0]
        except Exception as cause:
            raise Unsupported(f"a pipeline cannot split {name}: {type(cause).__name__}: {cause}") from cause
    order = [path for path, _, _ in calls]
    if sorted(order) != sorted(units):
        odd = sorted(set(units) ^ set(order)) or [path for path in order if order.count(path) > 1]
        raise Unsupported(f"a pipeline cannot split {name}: a forward does not call {odd[0]} exactly once")
    start = order.index(anatomy.blocks[0])
    if order[start : start + len(anatomy.blocks)] != list(anatomy.blocks):
        raise Unsupported(f"a pipeline cannot split {name}: its blocks do not run one after the other")
    if not any(f"{anatomy.embed}.".startswith(f"{path}.") for path in order[:start]):
        raise Unsupported(f"a pipeline cannot split {name}: its blocks do not follow its embeddings")
    for (path, given, _), (before, _, out) in zip(calls[start + 1 :], calls[start:-1], strict=True):
        if not isinstance(given, Tensor) or given.shape != out.shape or not torch.equal(given.to(out.dtype), out):
            raise Unsupported(f"a pipeline cannot split {name}: it computes with the hidden states between {before} and {path}")
    if not isinstance(result, Tensor) or result.shape != calls[-1][2].shape or not torch.equal(result, calls[-1][2]):
        raise Unsupported(f"a pipeline cannot split {name}: it computes with the hidden states behind {order[-1]}")
    return Chain(tuple(order[:start]), tuple(order[start + len(anatomy.blocks) :]), returns_tuple)


def _units(model: Any) -> list[str]:
    """Returns the paths of the blocks, and of the outermost other modules of the body that have parameters."""
    anatomy = model.anatomy
    spine = {".".join(words[:end]) for path in anatomy.blocks for words in [path.split(".")] for end in range(len(words))}
    spine.add(anatomy.body)
    behind = tuple(f"{path}." for path in anatomy.behind)
    units = dict.fromkeys(anatomy.blocks)
    for path, part in model.named_modules():
        if any(parameter is not None for parameter in part._parameters.values()) and not f"{path}.".startswith(behind):
            words = path.split(".")
            ends = (".".join(words[:end]) for end in range(1, len(words) + 1))
            units.setdefault(next((prefix for prefix in ends if prefix not in spine), path))
    return list(units)


@cache
def arguments(body: type[nn.Module]) -> frozenset[str]:
    return frozenset(signature(body.forward).parameters)


def tied(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first.setdefault(id(p), name) != name}
