"""The loss to minimize, chosen by `[objective]`. The model calls it with its head, in the last pipeline stage."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from forge_core.batch import IGNORE
from forge_core.component import FREE, IDENTITY, Component, Place
from forge_core.features import Feature
from forge_core.protocols.model import LossTerms

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from forge_core.protocols.model import Head


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Component):
    """Negative log-likelihood of the next token, summed over valid positions."""

    key_class: ClassVar = IDENTITY

    z_loss: Annotated[float, Ge(0)] = 0.0
    """Weight of the squared log partition function, which keeps logits from drifting (Chowdhery et al., 2022)."""

    label_smoothing: Annotated[float, Ge(0), Lt(1), Feature("label_smoothing", unless=0.0, plane="model")] = 0.0
    """Share of the target spread evenly over all words (Szegedy et al., 2016). Reported losses are those of the labels."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[CrossEntropy]":
        """Returns examples with and without further terms."""
        return (cls(), cls(z_loss=0.1), cls(z_loss=0.1, label_smoothing=0.2))

    def __call__(self, head: "Head", hidden: "Tensor", labels: "Tensor") -> LossTerms:
        """Returns the sum over valid tokens of nll + z_loss z, with z the squared log partition function.

        With `label_smoothing` a, the minimized loss is (1 - a) nll + a (mean nll of all words as the label) + z_loss z. Only the
        gradient is that of the smoothed loss: the values of the sum and of each row remain those of the labels, so that losses
        can be compared with those of a run without smoothing. MTP modules are trained and reported in the same way.

        Metrics, each a sum over valid tokens: `nll`; `z`, with a z-loss; `smoothed`, the minimized loss, with smoothing.

        Args:
            head: head of the model.
            hidden: (B, T, embed) hidden states after the final norm.
            labels: (B, T) int64 labels, already shifted.
        """
        from forge_models.autograd import with_gradient_of

        smoothed: dict[str, Any] = {"smoothing": self.label_smoothing} if self.label_smoothing else {}
        total, nll, z = head.loss(hidden, labels, self.z_loss, **smoothed)
        metrics = {"nll": nll.sum(), "z": z.sum()} if self.z_loss else {"nll": nll.sum()}
        each = nll + self.z_loss * z if self.z_loss else nll
        if smoothed:
            metrics["smoothed"] = total.detach()
            total = with_gradient_of(each.sum().detach(), total)
        return LossTerms(total, (labels != IGNORE).sum(), metrics, each.sum(1))


@dataclass(frozen=True, kw_only=True)
class DPO(Component):
    """Direct preference optimization: trains on pairs of a chosen and a rejected answer, compared with frozen weights.

    All sources must be preference pairs. The frozen weights are those that the run starts from; their log-probabilities of all
    answers are computed once before the first step, and stored in the folder of the run's data. The loss is the mean over pairs.
    """

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.preference:PreferenceLoss"
    feature: ClassVar[str] = "dpo"
    pairs: ClassVar[bool] = True
    """True: it needs sources of preference pairs, which other objectives refuse."""
    whole_rows: ClassVar[bool] = True
    """True: ranks must not share rows."""
    predicts_next: ClassVar[bool] = False
    """False: labels are not trained as next tokens alone, so multi-token prediction is refused."""
    evaluated: ClassVar[tuple[str, ...]] = ("accuracy", "margin")
    """Metrics that evaluations report in place of the perplexity."""

    beta: Annotated[float, Gt(0)] = 0.1
    """Strength of the pull toward the reference; smaller values allow larger changes."""
    loss: Literal["sigmoid", "robust", "ipo"] = "sigmoid"
    """Loss of a pair: `sigmoid` (Rafailov et al., 2023); `robust`, unbiased if a share `label_smoothing` of the pairs is in the
    wrong order (Chowdhury et al., 2024); or `ipo`, a squared distance of means per token (Azar et al., 2024)."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Share of pairs that may be in the wrong order, for `sigmoid` and `robust`."""
    nll: Annotated[float, Ge(0)] = 0.0
    """Weight of the mean nll per token of the chosen answer, which is added to the loss (Pang et al., 2024)."""

    def __post_init__(self) -> None:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing has no effect with loss = 'ipo'; remove it, or set loss = 'sigmoid'")

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[DPO]":
        """Returns an example of each loss."""
        return (cls(), cls(label_smoothing=0.1), cls(loss="robust", label_smoothing=0.1), cls(loss="ipo", nll=0.5))


@dataclass(frozen=True, kw_only=True)
class Classification(Component):
    """Classification of whole texts: cross-entropy over `model.labels` at the last token of each.

    The loss is the mean over texts. All sources must have the labels of the model, as a source `labeled`.
    """

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.classification:ClassificationLoss"
    feature: ClassVar[str] = "classification"
    classifies: ClassVar[bool] = True
    """True: it needs a model with labels, which other objectives refuse."""
    either_direction: ClassVar[bool] = True
    """True: the model may be causal or bidirectional."""
    predicts_next: ClassVar[bool] = False
    """False: labels are no next tokens, so multi-token prediction is refused."""
    evaluated: ClassVar[tuple[str, ...]] = ("accuracy",)
    """Metrics that evaluations report in place of the perplexity."""

    class_weights: tuple[Annotated[float, Gt(0)], ...] = ()
    """Weight of the loss of texts with each label, in the order of `model.labels`, such as larger ones for rare labels; all are 1
    when absent. The loss is still divided by the number of texts."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Classification]":
        """Returns an example."""
        return (cls(),)


@dataclass(frozen=True, kw_only=True)
class Distillation(Component):
    """Distillation from a frozen teacher (Hinton et al., 2015): (1 - weight) nll + weight temperature^2 KL(teacher || model).

    The teacher must have the tokenizer and the vocabulary of the run. Every rank of the last pipeline stage holds all of it, and
    runs it on each batch; logits of both models exist for a few rows at a time.
    """

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.distillation:DistillationLoss"
    feature: ClassVar[str] = "distillation"
    whole_rows: ClassVar[bool] = True
    """True: ranks must not share rows."""
    whole_vocabulary: ClassVar[bool] = True
    """True: ranks must not share the vocabulary."""
    predicts_next: ClassVar[bool] = False
    """False: multi-token prediction, for which the teacher has no answer, is refused."""
    evaluated: ClassVar[tuple[str, ...]] = ("nll", "kl")
    """Metrics that evaluations report in place of the perplexity."""

    teacher: Annotated[str, Place]
    """Weights of the teacher: a run, a checkpoint, or a folder in the Hugging Face format. With `stored`, they are only compared
    with those of the store; `sha256:HASH`, which `forge-train teach` prints, then stands for weights that are elsewhere."""
    stored: Annotated[str | None, FREE, Place] = None
    """Folder that `forge-train teach` has written, with the `top_k` most likely words of the teacher for all rows of the data; no
    rank then holds the teacher. When absent, the teacher runs."""
    weight: Annotated[float, Gt(0), Le(1)] = 0.5
    """Share of the divergence in the loss; the rest is the negative log-likelihood of the labels."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Divides the logits of both models in the divergence; above 1, unlikely words count more."""
    top_k: Annotated[int, Gt(0)] | None = None
    """Number of most likely words of the teacher, renormalized, that are its distribution; unset (`"none"`), all words."""

    def __post_init__(self) -> None:
        if self.stored is not None and self.top_k is None:
            raise ValueError("stored has the most likely words only; set top_k to their number")

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Distillation]":
        """Returns examples of all words and of a few."""
        return (cls(teacher=str(folder)), cls(teacher=str(folder), weight=1.0, temperature=2.0, top_k=3))


@dataclass(frozen=True, kw_only=True)
class MaskedLM(Component):
    """Masked language modeling (BERT, Devlin et al., 2019): fills in tokens from both sides. It needs a bidirectional model.

    Tokens that next-token training would predict may be chosen, so prompts of conversations and the first token of a document
    never are. The choice depends on `seed`, the number of the row and the position only; held-out rows have the same mask in
    every evaluation. The loss is the mean negative log-likelihood of chosen tokens.
    """

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.masking:MaskedLMLoss"
    feature: ClassVar[str] = "masked_lm"
    bidirectional: ClassVar[bool] = True
    """True: it needs a model whose tokens see their whole document."""
    predicts_next: ClassVar[bool] = False
    """False: labels are no next tokens, so multi-token prediction is refused."""
    evaluated: ClassVar[tuple[str, ...]] = ("nll",)
    """Metrics that evaluations report in place of the perplexity."""

    mask_id: Annotated[int, Ge(0)]
    """Token id that stands for a hidden token."""
    vocab_size: Annotated[int, Gt(0)]
    """Number of token ids from which random tokens are drawn: that of the tokenizer."""
    ratio: Annotated[float, Gt(0), Lt(1)] = 0.15
    """Probability with which a token is chosen."""
    random: Annotated[float, Ge(0), Le(1)] = 0.1
    """Share of chosen tokens that a random token replaces, instead of `mask_id`."""
    kept: Annotated[float, Ge(0), Le(1)] = 0.1
    """Share of chosen tokens that stay as they are."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the choice, apart from that of the job: runs with other initial weights have the same masks."""

    def __post_init__(self) -> None:
        if self.random + self.kept > 1:
            raise ValueError(f"random {self.random} and kept {self.kept} exceed 1 together; lower one")

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[MaskedLM]":
        """Returns examples with and without random tokens."""
        return (cls(mask_id=1, vocab_size=8, ratio=0.5), cls(mask_id=1, vocab_size=8, random=0.0, kept=0.0, ratio=0.5))


@dataclass(frozen=True, kw_only=True)
class MaskedDiffusion(Component):
    """Masked diffusion (LLaDA, Nie et al., 2025): fills in a random share t of tokens; needs `model.attention.causal = false`.

    t is uniform in [smallest, 1], and each token is hidden with probability t. Tokens that next-token training would predict may
    be hidden. The loss is the sum of nll / t over hidden tokens, divided by the number of tokens that may be hidden: on average
    an upper bound of their negative log-likelihood. The choice depends on `seed`, the number of the row and the position only;
    held-out rows have the same mask in every evaluation.
    """

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.masking:MaskedDiffusionLoss"
    feature: ClassVar[str] = "masked_diffusion"
    bidirectional: ClassVar[bool] = True
    """True: it needs a model whose tokens see their whole document."""
    whole_rows: ClassVar[bool] = True
    """True: ranks must not share rows."""
    predicts_next: ClassVar[bool] = False
    """False: labels are no next tokens, so multi-token prediction is refused."""

    mask_id: Annotated[int, Ge(0)]
    """Token id that stands for a hidden token."""
    per: Literal["document", "row"] = "document"
    """What has a t of its own: each document of a row, or each row."""
    smallest: Annotated[float, Gt(0), Lt(1)] = 1e-3
    """Minimum t, which bounds the factor 1 / t."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the choice, apart from that of the job: runs with other initial weights have the same masks."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[MaskedDiffusion]":
        """Returns an example for documents and one for rows."""
        return (cls(mask_id=1), cls(mask_id=1, per="row", smallest=0.2))
