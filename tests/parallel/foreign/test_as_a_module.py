"""The result of `parallelize` where a loop expects a module: in every layout what a plain module gives, or refused."""

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel import ParallelizedModule, parallelize
from forge_parallel.transforms.recompute import Recompute
from harness.pool import World
from harness.siblings import fast
from parallel.foreign_modules import BUILDERS, PLAN, VOCAB, Plain, llama_tied, tied

TOKENS = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(5))


class Counted(Plain):
    """With a parameter that is frozen and a buffer that changes."""

    calls: Tensor

    def __init__(self, tied: bool = True) -> None:
        super().__init__(tied)
        self.norm.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(tokens)


def _model(layout: str, build: Callable[[], nn.Module] = Counted, **options: Any) -> ParallelizedModule:
    return parallelize(build, layout, tp_plan=PLAN if "tp" in layout else None, state="fp64", compute="fp64", **options)


def _plain(model: ParallelizedModule, build: Callable[[], nn.Module] = Counted) -> nn.Module:
    plain = build().double()
    plain.load_state_dict(model.state_dict(whole=True))
    return plain


def _mine(model: ParallelizedModule, tokens: Tensor = TOKENS) -> Tensor:
    return tokens.chunk(model.data_ranks)[model.data_rank]


def _loss(module: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(module(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _averaged(module: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor, list[bool]]:
    """A loop with clipping and two averages of the weights, which takes a module and knows nothing else."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    by_hand = deepcopy(module).eval()
    by_torch = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    for _ in range(3):
        module.train()
        _loss(module, tokens).backward()
        clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        module.zero_grad()
        by_torch.update_parameters(module)
        with torch.no_grad():
            for average, parameter in zip(by_hand.parameters(), module.parameters(), strict=True):
                average.lerp_(parameter, 0.5)
        module.eval()
    with torch.no_grad():
        outputs = [model(TOKENS) for model in (module, by_hand, by_torch)]
    assert (
        module.training
        == by_hand.training
        == module.get_submodule("module" if isinstance(module, ParallelizedModule) else "").training
    )
    frozen = [parameter.requires_grad for parameter in by_hand.parameters()]
    return torch.stack(outputs), next(iter(module.buffers())).clone(), frozen


def _used(layout: str) -> list[tuple[Any, Any]]:
    model = _model(layout)
    plain = _plain(model)
    right = _averaged(plain, TOKENS)
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    every = dict(plain.named_parameters(remove_duplicate=False)).keys()
    assert dict(model.named_parameters(remove_duplicate=False)).keys() == every
    assert dict(model.named_buffers()).keys() == dict(plain.named_buffers()).keys()
    found = _averaged(model, _mine(model))
    dict(model.named_parameters())["embed.weight"].requires_grad_(False)
    other = deepcopy(model)
    assert not any(part.training for part in other.modules()), "as the model, which was evaluated last"
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in model.parameters()]
    inner = deepcopy(model.module)
    with torch.no_grad():
        same = torch.equal(inner(TOKENS), model(TOKENS))
    return [(found, right), (same, True)]


@pytest.mark.parametrize("layout", fast("dp2", "tp2", of=["1", "dp2", "tp2", "dp2tp2", "hsdp2x2"]))
def test_trials_d11_a_loop_that_takes_a_module(world: World, layout: str) -> None:
    for (found, right), (same, _) in world.run(_used, Layout.parse(layout).world, layout, timeout=300):
        torch.testing.assert_close(found[0], right[0], rtol=0, atol=1e-10)
        assert found[1:] == right[1:]
        assert same
        assert found[2].count(False) == 1


OPTIONS: dict[str, dict[str, Any]] = {
    "recomputed": {"transforms": [Recompute(policy="full")]},
    "bf16": {"compute": "bf16", "state": "fp32"},
}


def _copied(layout: str, named: str) -> list[tuple[float, float]]:
    """The loss of a step of a model and of a copy: at first, and once the copy has other weights, of it and of its copy."""
    model = parallelize(Plain, layout, tp_plan=PLAN if "tp" in layout else None, **OPTIONS.get(named, {}))
    copy = deepcopy(model)

    def loss(one: ParallelizedModule) -> float:
        return float(one.step([{"tokens": TOKENS[:2]}, {"tokens": TOKENS[2:]}], lambda out, _: out.float().square().mean()))

    pairs = [(loss(copy), loss(model))]
    for parameter in copy.parameters():
        parameter.data.mul_(1.5)
    pairs.append((loss(deepcopy(copy)), loss(copy)))
    pairs.append((loss(model), pairs[0][1]))
    return pairs


@pytest.mark.parametrize(
    ("layout", "named"), fast(("pp2", ""), of=[("pp2", ""), *((layout, name) for layout in ("dp2", "tp2") for name in OPTIONS)])
)
def test_trials_d11_a_copy_has_weights_of_its_own(world: World, layout: str, named: str) -> None:
    for pairs in world.run(_copied, 2, layout, named):
        assert all(one == other for one, other in pairs), pairs
        assert pairs[1][0] != pairs[0][0]


def _moved(layout: str) -> dict[str, str]:
    model = _model(layout)
    same = [model.to("cpu"), model.to(torch.float64), model.double(), model.cpu(), model.to(torch.device("cpu"), torch.float64)]
    assert all(each is model for each in same)
    found = {}
    changes: dict[str, Callable[[], Any]] = {
        "to": lambda: model.to(torch.bfloat16),
        "half": model.half,
        "meta": lambda: model.to("meta"),
        "apply": lambda: model.apply(lambda part: None),
        "assign": lambda: model.load_state_dict(model.state_dict(whole=True), assign=True),
    }
    for name, change in changes.items():
        try:
            change()
        except PlanError as refusal:
            found[name] = str(refusal)
    return found


def test_trials_d11_what_is_not_defined_is_refused_with_the_line_to_write(world: World) -> None:
    for found in world.run(_moved, 2, "dp2"):
        for name in ("to", "half", "meta"):
            assert "use parallelize(..., device=..., state=..., compute=...)" in found[name]
        assert "torch.float64 on cpu and cannot become torch.bfloat16" in found["to"]
        assert "in the function that builds the module" in found["apply"]
        assert "assign=True" in found["assign"]


def _clipped(layout: str) -> tuple[float, float]:
    model = _model(layout)
    _loss(model, _mine(model)).backward()
    norm = float(clip_grad_norm_(model.parameters(), 1e9).full_tensor())  # type: ignore[attr-defined]
    return norm, float(model.clip_grad_norm_(1e9))


@pytest.mark.parametrize("layout", fast("dp2tp2", of=["dp2", "tp2", "dp2tp2", "hsdp2x1tp2", "hsdp2x2"]))
def test_trials_d3_torchs_clipping_has_the_norm_over_all_ranks(world: World, layout: str) -> None:
    found = world.run(_clipped, Layout.parse(layout).world, layout)
    torch.manual_seed(0)
    for theirs, ours in found:
        assert theirs == pytest.approx(ours, rel=1e-12)
        assert theirs == pytest.approx(found[0][0], rel=1e-12)


def _clipped_stages() -> tuple[list[str], float, dict[str, Tensor]]:
    model = _model("pp2", tied)
    start = model.state_dict(whole=True)
    model.step([{"tokens": TOKENS}] * 2, lambda out, batch: out.square().sum())
    found = []
    kept = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for parameters in (model.parameters(), list(model.parameters()), model.parts[0].parameters(), next(model.parameters())):
        try:
            clip_grad_norm_(parameters, 1e-3)
        except PlanError as refusal:
            found.append(str(refusal))
    assert all(torch.equal(p.grad, g) for p, g in zip((p for p in model.parameters() if p.grad is not None), kept, strict=True))
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e9)
    clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)
    return found, float(model.clip_grad_norm_(1e9)), start


def test_trials_d3_torchs_clipping_of_a_stage_is_refused(world: World) -> None:
    results = world.run(_clipped_stages, 2)
    plain = tied().double()
    plain.load_state_dict(results[0][2])
    plain(TOKENS).square().sum().backward()
    norm = float(clip_grad_norm_(plain.parameters(), 1e9))
    for refusals, found, _ in results:
        assert len(refusals) == 4
        assert all("write model.clip_grad_norm_(max_norm)" in refusal for refusal in refusals)
        assert found == pytest.approx(norm, rel=1e-12)


class Buffered(Plain):
    """Tied, with a persistent buffer in each block and outside of them."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        for number, block in enumerate(self.blocks):
            block.register_buffer("number", torch.tensor(float(number)))


def _states(layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    model = _model(layout, Buffered)
    whole = model.state_dict(whole=True)
    other = {name: value * 2 for name, value in whole.items()}
    missing = model.load_state_dict({name: value for name, value in other.items() if name != "embed.weight"})
    assert missing.missing_keys == missing.unexpected_keys == []
    refusals = []
    for change in ({"head.weight": whole["head.weight"]}, {"more": whole["head.weight"]}, {"norm.weight": torch.ones(3)}):
        try:
            model.load_state_dict({**other, **change})
        except PlanError as refusal:
            refusals.append(str(refusal))
    assert model.load_state_dict({"more": TOKENS}, strict=False).unexpected_keys == ["more"]
    return whole, model.state_dict(whole=True), refusals


@pytest.mark.parametrize("layout", ["1", *fast("pp2", of=["tp2", "dp2", "pp2"])])
def test_trials_d9_a_whole_state_loads_strictly_into_the_plain_module(world: World, layout: str) -> None:
    for whole, other, refusals in world.run(_states, Layout.parse(layout).world, layout):
        plain = Buffered().double()
        plain.load_state_dict(whole, strict=True)
        assert torch.equal(plain.state_dict()["head.weight"], whole["embed.weight"])
        assert whole["blocks.2.number"] == 2
        assert other.keys() == whole.keys()
        assert all(torch.equal(other[name], value * 2) for name, value in whole.items())
        assert "head.weight and embed.weight are tied" in refusals[0]
        assert "the module has no more; " in refusals[1]
        assert re.search(r"norm\.weight has shape \(8,\) in the module, but \(3,\) in the state", refusals[2])


class Scored(Plain):
    """Takes labels and returns its loss, as transformers' models do."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None, weights: Tensor | None = None) -> Any:  # type: ignore[override]
        out = super().forward(tokens)
        if labels is None:
            return out
        each = F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return (each.mean() if weights is None else (each * weights).sum() / weights.sum(), out)


class Weighing(Scored):
    """Lets its embedding see what is for the loss."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None, weights: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(tokens if weights is None else tokens * weights.to(tokens), labels, weights)


LABELS = (TOKENS + 3) % VOCAB
WEIGHTS = (TOKENS % 3 != 0).double()
EXAMPLE = {"tokens": TOKENS, "labels": LABELS, "weights": WEIGHTS}


def _scored(layout: str, way: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    model = _model(layout, Scored, example=EXAMPLE if "pp" in layout else None)
    start = model.state_dict(whole=True)
    mine = [{name: value[row : row + 1] for name, value in EXAMPLE.items()} for row in _mine(model, torch.arange(4)).tolist()]
    if way == "targets":
        pairs: list[Any] = [(batch["labels"], batch["weights"]) for batch in mine]

        def loss(out: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
            each = F.cross_entropy(out.flatten(0, 1), target[0].flatten(), reduction="none")
            return (each * target[1].flatten()).sum()

        counts = {id(batch["tokens"]): batch["weights"].sum() for batch in mine}
        inputs = [{"tokens": batch["tokens"]} for batch in mine]
        mean = model.step(inputs, loss, lambda batch: counts[id(batch["tokens"])], targets=pairs)
    else:
        mean = model.step(mine, tokens=lambda batch: batch["weights"].sum())
    from forge_parallel.model.parallel_model import gathered

    return float(mean), start, gathered(model, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("way", ["targets", "in the module"])
@pytest.mark.parametrize("layout", fast("pp2", of=["1", "dp2", "pp2", "pp2dp2"]))
def test_trials_d11_targets_are_an_argument_and_a_loss_may_be_in_the_module(world: World, layout: str, way: str) -> None:
    results = world.run(_scored, Layout.parse(layout).world, layout, way, timeout=180)
    plain = Scored().double()
    plain.load_state_dict(results[0][1])
    expected = plain(**EXAMPLE)[0]
    expected.backward()
    for mean, _, gradients in results:
        assert mean == pytest.approx(expected.item(), rel=1e-12)
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12)


def _of_transformers() -> tuple[float, dict[str, Tensor], float]:
    example = {"input_ids": TOKENS, "labels": TOKENS}
    model = parallelize(llama_tied, "pp2", state="fp64", compute="fp64", example=example)
    halves = [{name: value[:2] for name, value in example.items()}, {name: value[2:] for name, value in example.items()}]
    start = model.state_dict(whole=True)
    return float(model.step(halves)), start, float(model.clip_grad_norm_(1e9))


@pytest.mark.slow
def test_trials_d11_a_transformers_model_with_labels_in_a_pipeline(world: World) -> None:
    results = world.run(_of_transformers, 2, timeout=300)
    plain = BUILDERS["llama, tied"]().double()
    plain.load_state_dict(results[0][1])
    expected = plain(input_ids=TOKENS, labels=TOKENS).loss  # which transformers computes in fp32
    expected.backward()
    norm = float(clip_grad_norm_(plain.parameters(), 1e9))
    for mean, _, found in results:
        assert mean == pytest.approx(expected.item(), rel=1e-6)
        assert found == pytest.approx(norm, rel=1e-6)


def _refused_in_a_pipeline() -> dict[str, str]:
    found = {}
    model = _model("pp2", Scored)
    calls: dict[str, Callable[[], Any]] = {
        "unknown": lambda: model.step([{"tokens": TOKENS, "labels": LABELS}] * 2),
        "called": lambda: model(TOKENS),
        "none": lambda: _model("dp2", Scored).step([{"tokens": TOKENS}]),
        "reaches": lambda: _model("pp2", Weighing, example={**EXAMPLE, "weights": torch.ones(4, 7)}),
    }
    for name, call in calls.items():
        try:
            call()
        except PlanError as refusal:
            found[name] = str(refusal)
    return found


def test_trials_d11_what_a_pipeline_cannot_hand_on_is_refused(world: World) -> None:
    for found in world.run(_refused_in_a_pipeline, 2):
        assert "a batch has labels, tokens; name all arguments in parallelize(..., example={...})" in found["unknown"]
        assert "write model.step(batches, loss, tokens)" in found["called"]
        assert "the module's output (Tensor) contains no loss; give loss=" in found["none"]
        assert "the input of embed depends on argument 'weights'" in found["reaches"]
