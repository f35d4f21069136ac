"""What a rank computes on its share of the features, compared operator by operator with the whole module: what it would compute
otherwise is refused with the line, before anything is laid out."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.errors import PlanError
from forge_parallel import parallelize
from forge_parallel.foreign.description import rules_of
from forge_parallel.foreign.tensor_trace import follow
from forge_parallel.model.parallel_model import gathered
from harness.pool import World

WIDTH, HEADS, VOCAB = 16, 4, 19
EACH = WIDTH // HEADS


class Attention(nn.Module):
    """Attention whose subclasses take heads apart in their own ways."""

    kv_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, self.kv_heads * EACH) for _ in range(2))

    def apart(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, EACH).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def together(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.together(self.attend(self.apart(self.q(x)), self.apart(self.k(x)), self.apart(self.v(x)))))


class Named(Attention):
    """As nanoGPT, T5, Whisper and lingua."""

    def apart(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], HEADS, EACH).transpose(1, 2)


class NamedHeads(Attention):
    """As einops does it in x-transformers: the width of a head follows from the number of heads, so nothing fails."""

    def apart(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], HEADS, x.shape[-1] // HEADS).transpose(1, 2)


class NamedTogether(Attention):
    def together(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], -1, WIDTH)


class NamedMerged(Attention):
    """Heads and rows as one dimension, as T5 and Fairseq once did."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (one.reshape(-1, *one.shape[2:]) for one in (q, k, v))
        out = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        return out.view(-1, HEADS, *out.shape[1:])


class Merged(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = q.shape[0]
        q, k, v = (one.reshape(-1, *one.shape[2:]) for one in (q, k, v))
        out = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        return out.view(rows, -1, *out.shape[1:])


class OneHead(Attention):
    """Products of all features: each rank has a summand of the scores."""

    def apart(self, x: Tensor) -> Tensor:
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(1, 2)).softmax(-1) @ v

    def together(self, x: Tensor) -> Tensor:
        return x


class InnerOutermost(Attention):
    """The width of a head outside, the heads inside: a rank's features are a part of every head."""

    def apart(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], EACH, -1).permute(0, 3, 1, 2)


class Slopes(Attention):
    """ALiBi from the number of heads that a tensor has."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1)
        far = torch.arange(q.shape[2])[None] - torch.arange(q.shape[2])[:, None]
        return F.scaled_dot_product_attention(q, k, v, slopes[:, None, None] * far)


class SlopesOfAll(Attention):
    """The same from the configuration, which meets fewer heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        return F.scaled_dot_product_attention(q, k, v, slopes[:, None, None].expand(HEADS, q.shape[2], q.shape[2]))


class ScaledBySize(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q / math.sqrt(q.shape[1]), k, v)


class ScaledByCount(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q * torch.tensor(float(q.shape[1])), k, v)


class Branching(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v) if q.shape[1] == HEADS else v


class Tiled(Attention):
    """Key-value heads repeated one after the other: query head 1 would meet the wrong one."""

    kv_heads = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


class Repeated(Attention):
    kv_heads = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


class Grouped(Attention):
    kv_heads = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class OwnScores(Attention):
    """Written out, with a mask and a softmax in fp32."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((q.shape[2], q.shape[2]), float("-inf")).triu(1)
        return (torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(EACH) + mask).softmax(-1).to(q.dtype) @ v


class Mlp(nn.Module):
    times = 1

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH * self.times, WIDTH)

    def act(self, x: Tensor) -> Tensor:
        return x.relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Joined(Mlp):
    """CReLU: the second half of the features follows the first on each rank, and not in the whole."""

    times = 2

    def act(self, x: Tensor) -> Tensor:
        return torch.cat([x.relu(), (-x).relu()], -1)


class Flipped(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return x.flip(-1)


class Rolled(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return x.roll(1, -1)


class Summed(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return x.cumsum(-1)


class Indexed(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return x[..., torch.arange(x.shape[-1] - 1, -1, -1)]


class Shuffled(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return F.channel_shuffle(x.transpose(1, 2), 2).transpose(1, 2)


class Transposed(Mlp):
    """Meets its own features along another dimension."""

    def act(self, x: Tensor) -> Tensor:
        return (x[..., None] * x[..., None, :]).mean(-1)


class Halved(Mlp):
    """Gated halves of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)

    def act(self, x: Tensor) -> Tensor:
        return F.glu(x, -1)


class Vector(Mlp):
    """A parameter for every feature, which the plan leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2 * WIDTH))

    def act(self, x: Tensor) -> Tensor:
        return x * self.scale


class Filtered(Mlp):
    """Every feature along the sequence by itself, by an operator that is not known."""

    def act(self, x: Tensor) -> Tensor:
        return F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)


class Written(Mlp):
    """A source that is written into a tensor, and met there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def act(self, x: Tensor) -> Tensor:
        made = torch.zeros(1, dtype=x.dtype)
        made = made.to(x.device) + 0 * x.detach().flatten()[:0].sum() if x.numel() < 0 else made
        made[:] = self.scale
        return x * made


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


HEADS_PLAN = {**{f"blocks.*.{name}": "colwise" for name in "qkv"}, "blocks.*.o": "rowwise"}
MLP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
TOKENS = torch.arange(20).view(2, 10) % VOCAB


def _plan(block: Any) -> dict[str, str]:
    return HEADS_PLAN if issubclass(block, Attention) else MLP_PLAN


REFUSED: list[tuple[Any, Callable[..., Any], str]] = [
    (Named, Named.apart, r"replace it by -1 or take it from the tensor's shape"),
    (NamedHeads, NamedHeads.apart, "applies view across.*replace it by -1"),
    (NamedTogether, NamedTogether.together, "replace it by -1"),
    (NamedMerged, NamedMerged.attend, "applies view across"),
    (OneHead, OneHead.attend, "applies bmm across"),
    (InnerOutermost, InnerOutermost.apart, "applies view across"),
    (Slopes, Slopes.attend, r"computes something else \(arange\)"),
    (SlopesOfAll, SlopesOfAll.attend, "fails with a tp rank's part of the features"),
    (ScaledBySize, ScaledBySize.attend, r"computes something else \(div\)"),
    (ScaledByCount, ScaledByCount.attend, r"computes something else \(lift_fresh\)"),
    (Branching, Branching.together, "computes something else"),
    (Tiled, Tiled.attend, "applies repeat across"),
    (Joined, Joined.act, "applies cat across"),
    (Flipped, Flipped.act, "applies flip across"),
    (Rolled, Rolled.act, "applies roll across"),
    (Summed, Summed.act, "applies cumsum across"),
    (Indexed, Indexed.act, r"computes something else \(arange\)"),
    (Shuffled, Shuffled.act, "channel_shuffle|applies view across"),
    (Transposed, Transposed.act, "applies mul across"),
    (Halved, Halved.act, "applies glu across"),
    (Vector, Vector.act, "fails with a tp rank's part of the features"),
    (Filtered, Filtered.act, "Forge has no rule"),
]


@pytest.mark.parametrize(("block", "code", "message"), REFUSED, ids=[block.__name__ for block, *_ in REFUSED])
def test_trials_d5_what_a_rank_would_compute_otherwise_is_refused_with_its_line(
    block: Any, code: Callable[..., Any], message: str
) -> None:
    module = Model(block).to("meta")
    with pytest.raises(PlanError, match=message) as refused:
        follow(module, rules_of(module, _plan(block)), TOKENS, 2)
    lines, first = inspect.getsourcelines(code)
    named = [f"{__file__}:{line}" for line in range(first, first + len(lines))]
    assert any(line in str(refused.value) for line in named), refused.value
    assert "blocks.0" in str(refused.value)


RIGHT: list[Any] = [Attention, Merged, Repeated, Grouped, OwnScores, Mlp, Written]


def _gradients(ranks: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for block in RIGHT:
        if ranks > block.__dict__.get("kv_heads", HEADS) or (ranks == HEADS and block is OwnScores):
            continue  # torch's einsum does other operators for a dimension of one
        torch.manual_seed(2)
        model = parallelize(Model(block), f"tp{ranks}", tp_plan=_plan(block), compute="fp64", state="fp64")
        model.module(TOKENS).square().mean().backward()
        found[block.__name__] = gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable()})
    return found


def _equal(world: World, ranks: int) -> None:
    for found in world.run(_gradients, ranks, ranks):
        for block in (block for block in RIGHT if block.__name__ in found):
            torch.manual_seed(2)
            module = Model(block).double()
            module(TOKENS).square().mean().backward()
            for key, parameter in module.named_parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(
                    found[block.__name__][key], parameter.grad, rtol=0, atol=1e-12, msg=lambda text, at=key: f"{at}: {text}"
                )


def test_trials_d5_what_is_followed_has_the_gradients_of_one_process(world: World) -> None:
    _equal(world, 2)


@pytest.mark.slow
def test_trials_d5_also_with_one_head_on_a_rank(world: World) -> None:
    _equal(world, 4)
