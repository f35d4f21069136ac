"""`[model.moe]`: experts instead of feed-forward layers, and routers: `router = { name = "sigmoid_topk", bias_rate = 1e-3 }`.

A model with this table is sparse, without it dense. A router component may define `check(experts, top_k)`, which raises
`ValueError` for sizes that do not fit together. `learned` says whether gradients reach the router, so that losses can balance it
(default True). `total` is the sum of a token's combine weights; None, the default, if it depends on the token.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import FREE, IDENTITY, Component, Slot
from forge_core.features import Feature
from forge_core.specs import Matrix
from forge_models.shape import ExpertKernel, Losses, MoEShape, RouterContext, RouterScores

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


BiasSchedule = Literal["constant", "cosine", "warmup"]


@dataclass(frozen=True, kw_only=True)
class SoftmaxTopKConfig(Component):
    """Takes the top_k of softmax(W x) (Shazeer et al., 2017; Switch, Fedus et al., 2021; Mixtral, Jiang et al., 2024)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.moe.routers:SoftmaxTopK"

    normalize: bool = True
    """Whether the chosen probabilities are divided by their sum, which makes them the softmax of the chosen logits; if not, they
    shrink with the number of experts."""
    bias: bool = False
    """Whether each expert's logit has a learned bias (gpt-oss)."""
    learned: ClassVar[bool] = True

    @property
    def total(self) -> float | None:
        return 1.0 if self.normalize else None

    def matrices(self, context: RouterContext) -> dict[str, Matrix]:
        """Returns the linear layers by name."""
        return _matrices(context)


@dataclass(frozen=True, kw_only=True)
class NormedTopKConfig(Component):
    """Takes the top_k of softmax(W z), with weights that are divided by their sum and multiplied with a learned factor of each
    expert (Gemma 4). z is x divided by its root mean square, times a learned vector, divided by sqrt(dim)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.moe.routers:NormedTopK"

    eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the mean square of x."""
    learned: ClassVar[bool] = True
    total: ClassVar[float | None] = None

    def matrices(self, context: RouterContext) -> dict[str, Matrix]:
        """Returns the linear layers by name."""
        return _matrices(context)


@dataclass(frozen=True, kw_only=True)
class SigmoidTopKConfig(Component):
    """Takes the top_k of s(W x) + bias, weighted by s(W x), with s the sigmoid (DeepSeek-V3, 2024, section 2.1.2).

    The bias is a buffer: after each optimizer step it rises by `bias_rate` for experts below the mean load of the whole batch and
    falls for those above. It affects only the choice of experts, not the combine weights.
    """

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.moe.routers:SigmoidTopK"

    scores: RouterScores = "sigmoid"
    """Function s of the logits: `sigmoid`, or `sqrt_softplus`, the root of ln(1 + exp(z)), which has no limit (DeepSeek-V4)."""
    normalize: bool = True
    """Whether the chosen scores are divided by their sum."""
    scaling: Annotated[float, Gt(0)] = 1.0
    """Factor on the combine weights."""
    n_group: Annotated[int, Gt(0)] = 1
    """Number of groups of equal size that experts form, in order. A group's score is the sum of its two best experts' scores."""
    topk_group: Annotated[int, Gt(0)] | None = None
    """Number of groups that a token may choose from, the best ones; all groups when absent. If the experts of a group are on one
    node, a token is sent to at most this many nodes."""
    bias_rate: Annotated[float, Ge(0), FREE] = 1e-3
    """Change of the bias in one step; 0 keeps it constant."""
    bias_schedule: Annotated[BiasSchedule, FREE] = "constant"
    """Schedule of the rate: over `bias_steps` steps, `cosine` lowers it to 0 and `warmup` raises it from 0."""
    bias_steps: Annotated[int, Gt(0), FREE] | None = None
    """Length of `cosine` and `warmup` in optimizer steps."""
    hash_layers: Annotated[tuple[Annotated[int, Ge(0)], ...], Feature("hash_layers", unless=(), plane="model")] = ()
    """Blocks, counted from 0, in which a fixed table of token ids names the experts, such as [0, 1, 2] (DeepSeek-V4; after Roller
    et al., 2021). Their weights are still those of the scores. The table is a buffer, drawn with the weights and never trained;
    these blocks have no bias, and no losses balance them."""
    learned: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if len(set(self.hash_layers)) < len(self.hash_layers):
            raise ValueError(f"hash_layers {list(self.hash_layers)} names a block twice")
        if (self.bias_schedule == "constant") != (self.bias_steps is None):
            raise ValueError(
                f"bias_steps must be set exactly when bias_schedule is 'cosine' or 'warmup', not {self.bias_schedule!r}"
            )
        if self.topk_group is not None and self.topk_group > self.n_group:
            raise ValueError(f"topk_group {self.topk_group} must be at most n_group {self.n_group}")

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[SigmoidTopKConfig]":
        """Returns examples with and without groups and schedules."""
        return (
            cls(),
            cls(normalize=False, n_group=4, topk_group=2),
            cls(scaling=2.5, bias_rate=0.01, bias_schedule="warmup", bias_steps=10),
            cls(scores="sqrt_softplus", scaling=1.5),
            cls(scores="sqrt_softplus", scaling=1.5, hash_layers=(1,)),
        )

    @property
    def total(self) -> float | None:
        return self.scaling if self.normalize else None

    @classmethod
    def passed(cls) -> tuple[str, ...]:
        """Returns the names of the arguments of the module: all fields but `hash_layers`."""
        return tuple(name for name in super().passed() if name != "hash_layers")

    def build(self, context: RouterContext) -> Any:
        """Returns the router of a block: `blocks.moe.token_table.TokenTable` in `hash_layers`, else `SigmoidTopK`."""
        if context.layer not in self.hash_layers:
            return super().build(context)
        from forge_models.blocks.moe.token_table import TokenTable

        return TokenTable(context, scores=self.scores, normalize=self.normalize, scaling=self.scaling)

    def matrices(self, context: RouterContext) -> dict[str, Matrix]:
        """Returns the linear layers by name."""
        return _matrices(context)

    @property
    def groups_kept(self) -> int:
        """`topk_group`, or the number of all groups when absent."""
        return self.n_group if self.topk_group is None else self.topk_group

    def check(self, experts: int, top_k: int) -> None:
        """Checks the settings against the sizes of the layer.

        Raises:
            ValueError: the sizes do not fit together.
        """
        if experts % self.n_group:
            raise ValueError(f"n_group {self.n_group} must divide experts {experts}")
        if self.n_group > 1 and self.hash_layers:
            raise ValueError("hash_layers does not support n_group, because a table names experts of any group; remove one")
        within = self.groups_kept * (experts // self.n_group)
        if top_k > within:
            raise ValueError(f"topk_group {self.topk_group} leaves {within} of {experts} experts, fewer than top_k {top_k}")


@dataclass(frozen=True, kw_only=True)
class TopKSigmoidConfig(Component):
    """Takes the top_k of W x, each weighted by the sigmoid of its own logit (Llama 4). Weights have no fixed sum."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.moe.routers:TopKSigmoid"

    learned: ClassVar[bool] = True
    total: ClassVar[float | None] = None

    def matrices(self, context: RouterContext) -> dict[str, Matrix]:
        """Returns the linear layers by name."""
        return _matrices(context)


@dataclass(frozen=True, kw_only=True)
class HashConfig(Component):
    """Fixed choice by token id; each of the top_k experts has weight 1 / top_k (Roller et al., 2021). Nothing is learned."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.moe.routers:Hash"

    seed: Annotated[int, Ge(0)] = 0
    """Seed of the choice; layers choose independently of each other."""
    learned: ClassVar[bool] = False
    total: ClassVar[float] = 1.0

    def matrices(self, context: RouterContext) -> dict[str, Matrix]:
        """Returns nothing, because the router has no linear layers."""
        return {}


def _matrices(context: RouterContext) -> dict[str, Matrix]:
    return {"weight": Matrix((context.experts, context.dim), (None, "embed"))}


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A layer of experts: a router chooses `top_k` experts for each token, and their outputs are summed with its weights."""

    key_class: ClassVar = IDENTITY

    experts: Annotated[int, Gt(0)] = 8
    """Number of experts of a layer, without shared experts."""
    top_k: Annotated[int, Gt(0)] = 2
    """Number of experts chosen for each token."""
    shared: Annotated[int, Ge(0)] = 0
    """Number of shared experts, which process every token in addition to the chosen ones."""
    shared_gate: bool = False
    """Whether the output of the shared experts is multiplied with sigmoid(w x), one number for each token (Qwen2-MoE)."""
    branch_norms: bool = False
    """Whether shared and chosen experts each have a norm before them and one behind, and the router reads the stream itself
    (Gemma 4). There is then no other norm before the layer; needs shared experts."""
    weigh_inputs: bool = False
    """Whether the weight of a chosen expert multiplies its input instead of its output (Llama 4)."""
    every: Annotated[int, Gt(0)] = 1
    """Every n-th layer (the n-th, the 2n-th, ...) has experts; the others have a feed-forward layer."""
    first_dense: Annotated[int, Ge(0)] = 0
    """Number of first layers that have no experts in any case."""
    ffn_dim: Annotated[int, Gt(0)] | None = None
    """Hidden width of one expert; the model's `ffn_dim` when absent. Fine-grained experts are narrower."""
    latent_dim: Annotated[Annotated[int, Gt(0)] | None, Feature("latent_experts", unless=None, plane="model")] = None
    """Width of the space in which the chosen experts work (Nemotron 3, `moe_latent_size`): tokens are projected to it before they
    are sent to their experts, and the sum of the outputs is projected back, so that ranks exchange fewer bytes. Router and shared
    experts keep the width of the model. When absent, the chosen experts have it as well."""
    capacity: Annotated[float, Gt(0)] | None = None
    """Capacity factor: an expert processes at most capacity * tokens * top_k / experts slots of one forward, those with the
    largest weights; the others are dropped. Later tokens and other rows can therefore affect an earlier token, also in
    evaluation. Generation with a cache drops nothing. When absent, nothing is dropped."""
    kernel: Annotated[ExpertKernel, FREE] = "auto"
    """Kernel: `grouped` (one product for all experts), `loop` (one expert after the other, any precision and width), or the one
    that fits best."""
    router: Annotated[Component, Slot("forge.routers", default="softmax_topk")] = Slot.unset()
    """Router that chooses the experts of each token."""
    losses: Losses = field(default_factory=Losses)
    """Router losses that are added to the loss."""

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than experts {self.experts}")
        if self.shared_gate and not self.shared:
            raise ValueError("shared_gate needs shared experts; set shared, or remove shared_gate")
        if self.branch_norms and (not self.shared or self.shared_gate):
            raise ValueError("branch_norms needs shared experts without a gate; set shared, or remove branch_norms")
        router = self._router
        if self.losses.any() and not getattr(router, "learned", True):
            raise ValueError(f"router {type(router).__name__} is not learned, so losses cannot balance it; remove losses")
        if self.losses.pooled and getattr(router, "hash_layers", ()):
            raise ValueError(
                "losses.pooled joins the loads of all layers, but tables of router.hash_layers follow no losses; use another one"
            )
        check: Any = getattr(router, "check", None)
        if check is not None:
            try:
                check(self.experts, self.top_k)
            except ValueError as cause:
                raise ValueError(f"router: {cause}") from cause

    @property
    def _router(self) -> Component:
        """`router`, or softmax top-k if this object was created in Python without a router."""
        return SoftmaxTopKConfig() if self.router is None else self.router

    def shape(self, ffn_dim: int) -> MoEShape:
        """Returns the shape with every default resolved, for a model whose feed-forward width is `ffn_dim`."""
        return MoEShape(
            experts=self.experts,
            top_k=self.top_k,
            shared=self.shared,
            shared_gate=self.shared_gate,
            branch_norms=self.branch_norms,
            latent_dim=self.latent_dim,
            weigh_inputs=self.weigh_inputs,
            every=self.every,
            first_dense=self.first_dense,
            ffn_dim=ffn_dim if self.ffn_dim is None else self.ffn_dim,
            capacity=self.capacity,
            kernel=self.kernel,
            router=self._router,
            losses=self.losses,
        )
