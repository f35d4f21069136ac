"""Recurrent layers against those of transformers in plain PyTorch: time and peak memory of one forward and backward.

    python benchmarks/models/recurrent.py --threads 1

`rule` is the delta rule with normalized queries and keys, `layer` the whole layer of Qwen3-Next with its projections, `mamba2`
that of Nemotron-H with as many groups as key heads and heads of half the width, `kimi_delta` that of Kimi Linear, without other
kernels on either side. Results and gradients of both sides are compared before anything is timed.
Times are of the processor, so use one thread; both sides alternate in one process, and the figure that counts is the ratio, given
with the spread of the pairs. Memory: each side runs alone in a process of its own; peak of resident memory over what it held
before the first forward. Linux only (it reads /proc).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet, torch_chunk_gated_delta_rule

from forge_models import DecoderConfig
from forge_models.blocks.delta_net import GatedDeltaNet, unit
from forge_models.blocks.delta_rule import gated_delta_rule
from forge_models.blocks.kimi_delta import KimiDelta
from forge_models.blocks.mamba import StateSpaceMixer
from forge_models.components.kimi_delta import KDA
from forge_models.components.recurrent import GDN
from forge_models.components.state_space import Mamba2

Run = Callable[..., Tensor]
SIDES = ("transformers", "forge")


def rule(options: argparse.Namespace) -> tuple[dict[str, Run], list[Tensor]]:
    """Both functions, and q, k, v, g and beta."""
    width, length = options.width, options.length
    q, k = (torch.randn(1, length, options.key_heads, width) for _ in range(2))
    v, g = torch.randn(1, length, options.heads, width), -0.1 * torch.rand(1, length, options.heads)

    def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return gated_delta_rule(unit(q) * width**-0.5, unit(k), v, g, beta)[0]

    return {"transformers": theirs, "forge": ours}, [q, k, v, g, torch.rand(1, length, options.heads)]


def layer(options: argparse.Namespace) -> tuple[dict[str, Run], list[Tensor]]:
    """Both layers with equal weights, and their input followed by a row of parameters of each."""
    sizes = {"linear_num_key_heads": options.key_heads, "linear_num_value_heads": options.heads}
    sizes |= {"linear_key_head_dim": options.width, "linear_value_head_dim": options.width}
    config = AutoConfig.for_model("qwen3_next", hidden_size=options.dim, **sizes)
    theirs = Qwen3NextGatedDeltaNet(config, 0)
    component = GDN(key_heads=options.key_heads, value_heads=options.heads, key_dim=options.width, norm_eps=1e-6)
    context = DecoderConfig(dim=options.dim, heads=8, vocab_size=8).shape.context(0)
    ours = component.build(context)
    assert isinstance(ours, GatedDeltaNet)
    _copy(theirs, ours)
    x = torch.randn(1, options.length, options.dim)
    runs: dict[str, Run] = {"transformers": lambda x: theirs(x), "forge": lambda x: ours(x, None, None)}  # type: ignore[arg-type]
    return runs, [x]


def _copy(theirs: Any, ours: nn.Module) -> None:
    """Copies weights, in the order that the reference's own function gives."""
    keys, values = theirs.key_dim, theirs.value_dim
    mixed, gates = theirs.in_proj_qkvz.weight, theirs.in_proj_ba.weight
    order = theirs.fix_query_key_value_ordering(*(torch.arange(len(x), dtype=torch.float64)[None, None] for x in (mixed, gates)))
    found = {f"{name}_proj.weight": mixed[rows.flatten().long()] for name, rows in zip("qkvz", order, strict=False)}
    found |= {f"{name}_proj.weight": gates[rows.flatten().long()] for name, rows in zip("ba", order[4:], strict=True)}
    filters = theirs.conv1d.weight.squeeze(1).split([keys, keys, values])
    found |= {f"{name}_conv.weight": part for name, part in zip("qkv", filters, strict=True)}
    found |= {"decay.A_log": theirs.A_log, "decay.dt_bias": theirs.dt_bias}
    ours.load_state_dict(found | {"norm.weight": theirs.norm.weight, "o_proj.weight": theirs.out_proj.weight})


def mamba2(options: argparse.Namespace) -> tuple[dict[str, Run], list[Tensor]]:
    """Both layers of Mamba-2 with equal weights, and their input."""
    heads, width, groups, states = options.heads, options.width // 2, options.key_heads, options.width
    sizes = {"mamba_num_heads": heads, "mamba_head_dim": width, "n_groups": groups, "ssm_state_size": states}
    config = AutoConfig.for_model("nemotron_h", hidden_size=options.dim, layers_block_type=["linear_attention"], **sizes)
    theirs: Any = NemotronHMamba2Mixer(config, 0)
    component = Mamba2(heads=heads, head_dim=width, groups=groups, state_dim=states, step_min=config.time_step_min, norm_eps=1e-5)
    ours = component.build(DecoderConfig(dim=options.dim, heads=8, vocab_size=8).shape.context(0))
    assert isinstance(ours, StateSpaceMixer)
    values, keys = heads * width, groups * states
    parts = theirs.in_proj.weight.split([values, values, keys, keys, heads])
    found = {f"{name}_proj.weight": part for name, part in zip(("z", "x", "b", "c", "dt"), parts, strict=True)}
    for slot, stored in (("weight", theirs.conv1d.weight.squeeze(1)), ("bias", theirs.conv1d.bias)):
        found |= {f"{name}_conv.{slot}": part for name, part in zip("xbc", stored.split([values, keys, keys]), strict=True)}
    found |= {f"steps.{name}": getattr(theirs, name) for name in ("A_log", "dt_bias", "D")}
    ours.load_state_dict(found | {"norm.weight": theirs.norm.weight, "o_proj.weight": theirs.out_proj.weight})
    x = torch.randn(1, options.length, options.dim)
    runs: dict[str, Run] = {"transformers": lambda x: theirs(x), "forge": lambda x: ours(x, None, None)}  # type: ignore[arg-type]
    return runs, [x]


def kimi_delta(options: argparse.Namespace) -> tuple[dict[str, Run], list[Tensor]]:
    """Both layers of Kimi Delta Attention with equal weights, and their input."""
    sizes: dict[str, Any] = {"linear_num_heads": options.heads, "linear_head_dim": options.width, "rms_norm_eps": 1e-5}
    sizes |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    theirs: Any = KimiLinearDeltaAttention(AutoConfig.for_model("kimi_linear", hidden_size=options.dim, **sizes), 0)
    with torch.no_grad():  # the constructor leaves them as the memory was; decays of 0.85 to 0.999 a token
        theirs.forget_gate.A_log.uniform_(0, 2.77)
        theirs.forget_gate.dt_bias.uniform_(-7, -4.5)
    component = KDA(heads=options.heads, head_dim=options.width, norm_eps=1e-5)
    ours = component.build(DecoderConfig(dim=options.dim, heads=8, vocab_size=8).shape.context(0))
    assert isinstance(ours, KimiDelta)
    names = {f"{name}_proj.weight": f"{name}_proj.weight" for name in ("q", "k", "v", "b", "g_a", "g_b", "o")}
    names |= {f"f_{end}_proj.weight": f"forget_gate.f_{end}_proj.weight" for end in "ab"}
    names |= {f"decay.{name}": f"forget_gate.{name}" for name in ("A_log", "dt_bias")} | {"norm.weight": "o_norm.weight"}
    found = {name: theirs.get_parameter(of) for name, of in names.items()}
    filters = theirs.conv1d.weight.squeeze(1).chunk(3)
    found |= {f"{name}_conv.weight": part for name, part in zip("qkv", filters, strict=True)}
    ours.load_state_dict({name: found[name].reshape(tensor.shape) for name, tensor in ours.state_dict().items()})
    x = torch.randn(1, options.length, options.dim)
    runs: dict[str, Run] = {"transformers": lambda x: theirs(x), "forge": lambda x: ours(x, None, None)}  # type: ignore[arg-type]
    return runs, [x]


PROBLEMS = {"rule": rule, "layer": layer, "mamba2": mamba2, "kimi_delta": kimi_delta}


def run(function: Run, given: list[Tensor]) -> tuple[float, list[Tensor]]:
    """Seconds of processor time of one forward and backward; the result and the gradients of the inputs."""
    given = [x.detach().requires_grad_() for x in given]
    start = time.process_time()
    out = function(*given)
    grad = out.detach() / out.detach().norm()
    out.backward(grad)
    return time.process_time() - start, [out.detach(), *(x.grad for x in given if x.grad is not None)]


def peak(side: str, what: str, options: argparse.Namespace) -> float:
    """MiB of resident memory that one forward and backward adds at its peak. Call in a fresh process."""
    runs, given = PROBLEMS[what](options)
    run(runs[side], [x[:, :64] for x in given])  # thread pools and kernels are there now, and gradients of parameters
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status("VmRSS")
    run(runs[side], given)
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def compare(what: str, options: argparse.Namespace, passed: list[str]) -> dict[str, object]:
    """One line of the table."""
    runs, given = PROBLEMS[what](options)
    found = {side: run(runs[side], given)[1] for side in SIDES}
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))
    pairs = [tuple(run(runs[side], given)[0] for side in SIDES) for _ in range(options.repeats)]
    ratios = sorted(ours / theirs for theirs, ours in pairs)
    memory = {}
    for side in SIDES:
        command = [sys.executable, __file__, *passed, "--peak", side, "--what", what]
        memory[side] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    return {
        "what": what,
        "length": options.length,
        "transformers_ms": round(1e3 * statistics.median(theirs for theirs, _ in pairs)),
        "forge_ms": round(1e3 * statistics.median(ours for _, ours in pairs)),
        "time_ratio": round(statistics.median(ratios), 3),
        "time_ratio_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        "transformers_mib": round(memory["transformers"]),
        "forge_mib": round(memory["forge"]),
        "memory_ratio": round(memory["forge"] / max(memory["transformers"], 1e-9), 3),
    }


def main() -> None:
    """Prints one JSON line for each problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048, help="tokens")
    parser.add_argument("--dim", type=int, default=2048, help="width of the residual stream")
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32, help="heads of values")
    parser.add_argument("--width", type=int, default=128, help="width of a head")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--what", choices=PROBLEMS, help="only one of them")
    parser.add_argument("--smoke", action="store_true", help="once, tiny, without meaning")
    parser.add_argument("--peak", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.length, options.dim, options.key_heads, options.heads, options.width, options.repeats = 96, 32, 2, 4, 8, 1
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.peak:
        print(peak(options.peak, options.what, options))
        return
    print(json.dumps({"torch": torch.__version__, "threads": options.threads, "repeats": options.repeats}))
    for what in [options.what] if options.what else PROBLEMS:
        print(json.dumps(compare(what, options, sys.argv[1:])), flush=True)


if __name__ == "__main__":
    main()
