"""What a pipeline hands from block to block, and what it cannot: found before a module is cut."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_parallel import parallelize, verify_layout
from forge_parallel.foreign.pipeline import stage
from parallel.foreign_modules import VOCAB, WIDTH, Block, Plain, llama

TOKENS = torch.arange(10).view(2, 5)
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


class Skip(Block):
    def forward(self, x: Tensor, x0: Any = None, factor: Any = 1) -> Tensor:  # type: ignore[override]
        return super().forward(x) * factor if x0 is None else super().forward(x) + x0


class Skipping(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Skip() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x0 = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, x0=x0)
        return self.head(self.norm(x))


class Reading(Skipping):
    """Blocks see the tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, tokens[..., None])
        return self.head(self.norm(x))


class Counting(Skipping):
    """Blocks see what depends on the input's shape and on their place alone, which every stage can make again."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, factor=torch.arange(x.shape[1])[:, None] / (index + 1))
        return self.head(self.norm(x))


class Side(Plain):
    """The second block gets what the first one got."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(self.norm(x))


class Twice(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(self.norm(x))


class Backwards(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.norm(x))


class Between(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        x = self.norm(x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


class Leaving(Plain):
    """The norm after the blocks gets the embedding."""

    def forward(self, tokens: Tensor) -> Tensor:
        x0 = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x0))


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2)


class Rooted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Positions(Plain):
    """Two tables, added up around the blocks: what pp cannot cut."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(16, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        x = self.embed(tokens) + self.positions(torch.arange(length).expand(rows, length))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Borrowing(Plain):
    """The logits are products with the table of the embedding."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T + self.head(x)


class Misnaming(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.blocks[0].gain  # type: ignore[operator]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Skipping, r"argument 'x0' of blocks\.0 depends on inputs or hidden states, but a pipeline passes only 'x'"),
        (Reading, r"argument 'x0' of blocks\.0 depends on inputs"),
        (Side, r"computes with the hidden states between blocks\.0 and blocks\.1"),
        (Twice, r"Twice calls blocks\.0 2 times"),
        (Backwards, r"calls its blocks in the order blocks\.2, blocks\.1, blocks\.0; give blocks=\[\.\.\.\] in"),
        (Between, "calls norm between its blocks"),
        (Leaving, r"between blocks\.2 and norm"),
        (Unused, r"Unused calls other never"),
        (Rooted, "the root contains the blocks and has parameters"),
        (Borrowing, r"embed\.weight is used outside embed \(Embedding\).* set pp to 1"),
        (Misnaming, r"blocks\.0 \(Block\) has no attribute 'gain'"),
        (Positions, r"between positions and blocks\.0,.*move everything before the blocks, .* into one module"),
    ],
)
def test_e2_what_a_pipeline_would_lose_is_refused(module: type[nn.Module], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        stage(module(), BLOCKS, TOKENS)


def test_e2_what_follows_from_shapes_is_made_again_by_every_stage() -> None:
    verify_layout(Counting, "pp2")


class Wide(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)  # type: ignore[assignment]


@pytest.mark.parametrize("example", [torch.zeros(2, 5, 4), torch.zeros(2, 4), {"tokens": TOKENS, "mask": None, "more": TOKENS}])
def test_inputs_that_a_pipeline_has_no_shape_for_are_refused(example: Any) -> None:
    with pytest.raises(PlanError, match=r"input must be \(rows, length\)|as example="):
        stage(Wide() if isinstance(example, Tensor) else Plain(), BLOCKS, example)


def test_e2_transformers_models_hand_on_hidden_states_alone() -> None:
    stage(llama(), ["model.layers.0", "model.layers.1"], TOKENS)


class Embeddings(nn.Module):
    """The advice, followed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        return self.tokens(tokens) + self.positions(torch.arange(length).expand(rows, length))


class Advised(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Embeddings()  # type: ignore[assignment]


def test_e10_two_tables_in_one_module_train_in_a_pipeline() -> None:
    """As the message says; loss and gradients are those of one process."""
    verify_layout(Advised, "pp2")


class Batched(Plain):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.pool = nn.BatchNorm1d(WIDTH, **options)


def test_e5_running_statistics_under_dp_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_parallel.placement.topology import Topology

    monkeypatch.setattr(Topology, "of", classmethod(lambda cls, layout, device: cls(layout, device, 0)))
    for layout in ("dp2", "hsdp2x1"):
        with pytest.raises(PlanError, match=r"pool \(BatchNorm1d\) keeps running statistics"):
            parallelize(Batched, layout)


def test_e5_statistics_of_one_data_rank_are_kept() -> None:
    parallelize(Batched, "1")
    verify_layout(lambda: Batched(track_running_stats=False), "dp2")
