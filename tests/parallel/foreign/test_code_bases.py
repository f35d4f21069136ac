"""The structures of well-known code bases in all kinds of layouts: the gradients of one process, or a refusal with an
action."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel import parallelize
from forge_parallel.foreign.description import example_for, rules_of
from forge_parallel.foreign.module import on_input
from forge_parallel.foreign.tensor_trace import follow
from forge_parallel.model.parallel_model import gathered
from harness.pool import World
from parallel.foreign_code import CODES

OWN = [
    name for name in CODES if name.partition(",")[0] in {"nanoGPT", "nanochat", "litgpt", "x-transformers", "lingua", "timm ViT"}
]
THEIRS = [name for name in CODES if name not in OWN]

LINE = r"\(\S+\.py:\d+\)"
NUMBERS = rf"{LINE} fails with a tp rank's part of the features: .*replace it by -1"
ACROSS = rf"{LINE} applies split across features .*; split the layer before it"
ROOT = "has parameters of its own, which no stage can hold.*or set pp to 1"
BETWEEN = "computes with the hidden states between .*or set pp to 1"
OTHERWISE = "cannot be (traced|split).*set pp to 1"
OUTSIDE = r"is used outside .*, but a pipeline stage holds only the modules that it runs; .*set pp to 1"
REFUSED: dict[tuple[str, str], str] = {
    ("nanoGPT, attention", "tp"): ACROSS,
    ("litgpt, attention", "tp"): NUMBERS,
    ("x-transformers, attention", "tp"): NUMBERS,
    ("lingua, attention", "tp"): NUMBERS,
    ("timm ViT, attention", "tp"): NUMBERS,
    ("T5, attention", "tp"): NUMBERS,
    ("Whisper, attention", "tp"): rf"{LINE} applies view across .*replace it by -1",  # heads would be taken for places
    ("Mamba", "tp"): ACROSS,
    ("nanoGPT", "pp"): BETWEEN,
    ("nanochat", "pp"): ROOT,
    ("x-transformers", "pp"): ROOT,
    ("timm ViT", "pp"): ROOT,
    ("GPT-2", "pp"): BETWEEN,
    ("BERT", "pp"): OTHERWISE,
    ("T5", "pp"): OTHERWISE,
    ("Whisper", "pp"): OUTSIDE,
    ("Mamba", "pp"): OUTSIDE,
    ("ViT", "pp"): OUTSIDE,
}
"""(code base, axis) -> the refusal, under pp whatever the plan of tp is. All others have to be right."""


def _loss(out: Any) -> Tensor:
    return (out if isinstance(out, Tensor) else out["logits"] if isinstance(out, dict) else out[0]).square().mean()


def _alone(name: str) -> nn.Module:
    torch.manual_seed(3)
    return CODES[name].build()


def _step(name: str, layout: str) -> dict[str, Tensor] | str:
    code = CODES[name]
    try:
        model = parallelize(_alone(name), layout, tp_plan=code.plan, example=dict(code.example), compute="fp64", state="fp64")
    except PlanError as refusal:
        return str(refusal)
    mine = {key: value.chunk(model.data_ranks)[model.data_rank] for key, value in code.example.items()}
    if Layout.parse(layout).pp > 1:
        rows = len(next(iter(mine.values())))
        batches = [{key: value[row : row + 1] for key, value in mine.items()} for row in range(rows)]
        model.step(batches, lambda out, _: _loss(out), lambda _: torch.ones((), dtype=torch.int64))
    else:
        _loss(model.module(**mine)).backward()
    return gathered(model, {key: tensor.grad for key, tensor, _ in model.trainable() if tensor.grad is not None})


def _steps(names: list[str], layouts: list[str]) -> dict[str, dict[str, Tensor] | str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch and transformers have to say of these models
        return {f"{name} in {layout}": _step(name, layout) for name in names for layout in layouts}


def _right_or_refused(world: World, names: list[str], layouts: list[str]) -> None:
    ranks = Layout.parse(layouts[0]).world
    for found in world.run(_steps, ranks, names, layouts, timeout=600):
        for name in names:
            expected = None
            for layout in layouts:
                mine = found[f"{name} in {layout}"]
                if refusal := REFUSED.get((name, "tp") if "tp" in layout else (name.partition(",")[0], layout[-3:-1])):
                    assert isinstance(mine, str), f"{name} in {layout} is not refused"
                    assert re.search(refusal, mine), mine
                    continue
                assert not isinstance(mine, str), f"{name} in {layout}: {mine}"
                expected = expected or _gradients(name)
                for key, gradient in expected.items():
                    error = (mine[key] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-9)
                    assert error < CODES[name].close, f"{name} in {layout}, {key}: {error:.1e}"


def _gradients(name: str) -> dict[str, Tensor]:
    """Of one process: parameters in fp64, buffers as their constructors make them."""
    module = _alone(name)
    for parameter in module.parameters():
        parameter.data = parameter.data.double()
    if hasattr(module, "config"):
        module.config.use_cache = False  # type: ignore[union-attr]
    _loss(module(**CODES[name].example)).backward()
    return {key: parameter.grad for key, parameter in module.named_parameters() if parameter.grad is not None}


def test_trials_d_some_structures_are_right_or_refused(world: World) -> None:
    _right_or_refused(world, ["nanochat", "lingua, attention", "timm ViT"], ["tp2"])
    _right_or_refused(world, ["litgpt"], ["pp2"])


@pytest.mark.slow
@pytest.mark.parametrize("names", [OWN, *([name] for name in THEIRS)], ids=["own", *THEIRS])
def test_trials_d_code_bases_are_right_or_refused(world: World, names: list[str]) -> None:
    _right_or_refused(world, names, ["tp2", "dp2", "pp2"])


@pytest.mark.slow
@pytest.mark.parametrize("names", [OWN, *([name] for name in THEIRS)], ids=["own", *THEIRS])
def test_trials_d_also_in_layouts_of_two_axes(world: World, names: list[str]) -> None:
    _right_or_refused(world, names, ["dp2tp2", "dp2pp2"])


GUESSED: list[tuple[str, str, str]] = [
    ("litgpt", "token ids", "'idx'"),
    ("lingua", "token ids", "'token_values'"),
    ("timm ViT", "features", "'x'"),
    ("T5", "token ids", "'input_ids'"),
]


@pytest.mark.parametrize(("name", "kind", "argument"), GUESSED)
def test_trials_d10_a_guess_that_fails_is_called_a_guess(name: str, kind: str, argument: str) -> None:
    """With the module and the line where it failed, and the argument that passes the input."""
    code = CODES[name]
    module = code.build().to("meta")
    with pytest.raises(PlanError) as refused:
        on_input(module, None, lambda given: follow(module, rules_of(module, code.plan or {}), given, 2))
    where = r"on the meta device, but \S+ fails \(\S+\.py:\d+\): "
    assert re.search(rf"{where}.*the input was a guess, {kind} of shape .*example={{{argument}: \.\.\.}}", str(refused.value))


@pytest.mark.parametrize("name", ["nanoGPT", "BERT"])
def test_trials_d10_a_guess_that_runs_is_taken(name: str) -> None:
    code = CODES[name]
    module = code.build().to("meta")
    example = example_for(module) if name != "nanoGPT" else example_for(module)[:, :4]
    assert follow(module, rules_of(module, code.plan or {}), example, 2) == frozenset()


class Late(nn.Module):
    """Begins, in the order of its constructor, with a layer that comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.embed = nn.Linear(8, 12), nn.Embedding(11, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def test_trials_d10_the_first_guess_that_runs_is_taken() -> None:
    guess = example_for(Late())
    assert not guess.is_floating_point()
    assert guess.max() < 11
