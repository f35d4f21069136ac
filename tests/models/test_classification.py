"""Classifiers against `LlamaForSequenceClassification` of transformers: loss, gradients and accuracy; and their keys."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from forge_core.batch import IGNORE, PADDING, Batch
from forge_core.errors import ForgeError
from forge_core.layout import Layout
from forge_models import DecoderConfig, LoRAConfig, MTPConfig, Sampling, generate
from forge_models.blocks.head import ChunkedCrossEntropy, Head
from forge_models.checks import objective_fits
from forge_models.classification import ClassificationLoss, has_head
from forge_models.components.attentions import GQA
from forge_models.objectives import Classification, CrossEntropy
from harness.closeness import wide
from models.test_against_transformers import llama_name

LABELS = ("no", "yes", "perhaps")
SIZES = (5, 9, 1, 7, 12, 3)
"""Tokens of each text."""
CLASSES = (0, 2, 1, 1, 2, 0)
PAD = 96
"""No text has this token."""


def texts() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(PAD, (size,), generator=draw) for size in SIZES]


def packed(rows: list[list[int]], length: int = 32) -> Batch:
    """Rows of these texts, one document after another, as a loader makes them."""
    tokens, labels = torch.zeros(len(rows), length, dtype=torch.int64), torch.full((len(rows), length), IGNORE)
    documents = torch.full((len(rows), length), PADDING, dtype=torch.int32)
    positions = torch.zeros(len(rows), length, dtype=torch.int32)
    for row, numbers in enumerate(rows):
        at = 0
        for number, text in enumerate(numbers):
            ids = texts()[text]
            here = slice(at, at + len(ids))
            tokens[row, here], documents[row, here] = ids, number
            positions[row, here] = torch.arange(len(ids), dtype=torch.int32)
            at += len(ids)
            labels[row, at - 1] = CLASSES[text]
    return Batch(tokens, labels, positions, documents)


def run(model, component: Classification, batches: list[Batch]):
    """Sum, count, metrics and gradients of a model over some micro-batches."""
    objective = component.build()
    model.zero_grad()
    total, count, metrics = 0.0, 0, {}
    for batch in batches:
        inputs = {"positions": batch.positions, "documents": batch.documents}
        terms = model(batch.tokens, **inputs, labels=batch.labels, objective=objective.bound(batch))
        terms.sum.backward()
        torch.testing.assert_close(terms.rows.sum(), terms.sum.detach())
        assert int(objective.counts(batch).sum()) == int(terms.tokens)
        total, count = total + float(terms.sum.detach()), count + int(terms.tokens)
        metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in terms.metrics.items()}
    return total, count, metrics, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def llama(model):
    """A LlamaForSequenceClassification with the weights of `model`."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    shape = model.shape
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_length,
        rms_norm_eps=shape.norm.eps,
        rope_theta=shape.rope.theta,
        num_labels=shape.labels,
        pad_token_id=PAD,
        problem_type="single_label_classification",
        attn_implementation="eager",
    )
    twin = LlamaForSequenceClassification(config)
    with torch.no_grad():
        parameters = dict(twin.named_parameters())
        for name, value in model.named_parameters():
            parameters.pop(theirs(name)).copy_(value)
    assert not parameters
    return twin


def theirs(name: str) -> str:
    return "score.weight" if name == "head.weight" else llama_name(name)


@pytest.mark.parametrize("tied", [False, True])
@wide()
def test_loss_and_gradients_equal_llama_however_texts_are_packed(make, tied: bool) -> None:
    # A soft cap, a factor on logits and a tied table are those of words: transformers ignores them in a classifier.
    ours = {"soft_cap": 2.0, "logit_multiplier": 0.25, "tied_embeddings": True} if tied else {}
    model = make(dtype=torch.float64, spread=8.0, labels=LABELS, **ours)
    twin = llama(model)
    inputs = torch.full((len(SIZES), max(SIZES)), PAD)
    for row, ids in enumerate(texts()):
        inputs[row, : len(ids)] = ids
    found = twin(inputs, attention_mask=(inputs != PAD).long(), labels=torch.tensor(CLASSES))
    found.loss.backward()
    right = int((found.logits.argmax(1) == torch.tensor(CLASSES)).sum())
    assert 0 < right < len(SIZES), "a metric of all or none shows nothing"
    for rows in ([[[0], [1], [2], [3], [4], [5]]], [[[0, 3, 1]], [[4, 2], [5]]], [[[4, 2, 1]], [[3, 0, 5]]]):
        total, count, metrics, gradients = run(model, Classification(), [packed(batch) for batch in rows])
        assert count == len(SIZES) and metrics == {"accuracy": right}
        assert total / count == pytest.approx(float(found.loss.detach()), rel=1e-12)
        for name, parameter in twin.named_parameters():
            (own,) = [each for each in gradients if theirs(each) == name]
            limit = 1e-11 * float(parameter.grad.abs().max())
            torch.testing.assert_close(gradients[own] / count, parameter.grad, rtol=0, atol=limit, msg=name)


def test_weights_of_labels_are_those_of_torch_before_the_division(make) -> None:
    model, weights = make(dtype=torch.float64, spread=8.0, labels=LABELS), (0.5, 3.0, 1.0)
    batch = packed([[0], [1], [2], [3], [4], [5]])
    total, count, metrics, gradients = run(model, Classification(class_weights=weights), [batch])
    logits = model(batch.tokens, positions=batch.positions, documents=batch.documents)
    last = torch.stack([logits[row, size - 1] for row, size in enumerate(SIZES)])
    table = torch.tensor(weights, dtype=torch.float64)
    expected = F.cross_entropy(last, torch.tensor(CLASSES), table, reduction="sum")
    plain = F.cross_entropy(last, torch.tensor(CLASSES), reduction="sum")
    assert count == len(SIZES) and total == pytest.approx(float(expected.detach()), rel=1e-12)
    assert metrics["nll"] == pytest.approx(float(plain.detach()), rel=1e-12)
    for (name, found), other in zip(gradients.items(), torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-9, atol=1e-11, msg=name)


def test_a_bidirectional_classifier_reads_the_last_token_as_well(make) -> None:
    model = make(dtype=torch.float64, spread=8.0, labels=LABELS, attention=GQA(causal=False))
    totals = [
        run(model, Classification(), [packed(rows)])[0] for rows in ([[0], [1], [2], [3], [4], [5]], [[0, 3, 1], [4, 2, 5]])
    ]
    assert totals[0] == pytest.approx(totals[1], rel=1e-12)


@pytest.mark.parametrize("rows", [None, 3])
def test_ranks_that_share_labels_find_the_best_one(rows: int | None) -> None:
    draw = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(11, 6, generator=draw), torch.randn(7, 6, generator=draw)
    expected = (hidden @ weight.T).argmax(1)
    assert ChunkedCrossEntropy(rows).best(hidden, weight).tolist() == expected.tolist()
    shares, sent = ((0, 3), (3, 5), (5, 7)), []
    for first, stop in shares:
        ChunkedCrossEntropy(rows).split(first, lambda numbers: sent.append(numbers) or numbers[None]).best(
            hidden, weight[first:stop]
        )
    for first, stop in shares:
        core = ChunkedCrossEntropy(rows).split(first, lambda _: torch.stack(sent))
        assert core.best(hidden, weight[first:stop]).tolist() == expected.tolist()


def test_a_loss_head_without_a_best_row_is_refused() -> None:
    head = Head(4, 3, 0.02)
    head.core = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(ForgeError, match="has no `best`, which classification needs"):
        head.predicted(torch.zeros(1, 2, 4))


def test_targets_of_checks_are_labels_of_last_tokens() -> None:
    batch = packed([[0, 1], [4]], length=16)
    found = ClassificationLoss().with_targets(batch).labels
    assert ((found != IGNORE) == (batch.labels != IGNORE)).all() and set(found.unique().tolist()) <= {IGNORE, 0, 1}
    alone = ClassificationLoss().with_targets(Batch(batch.tokens, batch.labels)).labels
    assert (alone[:, :-1] == IGNORE).all() and (alone[:, -1] != IGNORE).all()


def test_the_head_is_trained_with_an_adapter(make) -> None:
    model = make(labels=LABELS, lora=LoRAConfig(rank=2))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "head.weight" in trained and all(name == "head.weight" or "lora" in name for name in trained)
    assert "head.weight" not in model.specs().base and "embed.weight" in model.specs().base
    plain = make(lora=LoRAConfig(rank=2))
    assert "head.weight" in plain.specs().base


CONFIG = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=40, max_length=64)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"labels": ("a",)}, r"labels \['a'\] must be at least two different names"),
        ({"labels": ("a", "a")}, "at least two different names"),
        ({"labels": ("a", "")}, "at least two different names"),
        ({"labels": LABELS, "mtp": MTPConfig()}, r"\[model.mtp\] has no tokens to predict; remove one"),
    ],
)
def test_labels_that_make_no_classifier_are_refused(keys, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **keys)


def test_a_classifier_generates_nothing(make) -> None:
    with pytest.raises(ForgeError, match=r"a classifier of 3 labels \(model.labels\) and predicts no next token"):
        generate(make(labels=LABELS), [[1, 2]], Sampling(), max_tokens=10**6)  # too many for any model


def job(**parts):
    return SimpleNamespace(
        **({"model": CONFIG, "objective": Classification(), "hooks": (), "transforms": MappingProxyType({})} | parts)
    )


@pytest.mark.parametrize(
    ("parts", "layout", "key", "message"),
    [
        ({}, "dp1", "model.labels", "is missing, but objective Classification needs the names"),
        ({"model": SimpleNamespace()}, "dp1", "model.name", "has no classifier"),
        ({"model": replace(CONFIG, labels=LABELS), "objective": CrossEntropy()}, "dp1", "objective.name", "of 3 labels"),
        (
            {"model": replace(CONFIG, labels=LABELS), "objective": Classification(class_weights=(1.0,))},
            "dp1",
            "objective.class_weights",
            "1 weights for 3 labels",
        ),
        ({"model": replace(CONFIG, labels=LABELS)}, "tp4", "parallel.tp", "4 ranks cannot share 3 labels"),
        (
            {"model": replace(CONFIG, labels=LABELS), "hooks": (SimpleNamespace(generates=True),)},
            "dp1",
            "hooks.0.name",
            "asks for next tokens",
        ),
    ],
)
def test_recipes_that_do_not_fit_are_refused(parts, layout: str, key: str, message: str) -> None:
    (fault,) = objective_fits(job(**parts), Layout.parse(layout))
    assert fault.key == key and message in fault.message and fault.hint


@pytest.mark.parametrize("layout", ["dp1", "tp2", "tp3", "cp2"])
def test_recipes_that_fit_have_no_fault(layout: str) -> None:
    assert not [*objective_fits(job(model=replace(CONFIG, labels=LABELS)), Layout.parse(layout))]


def test_the_head_of_weights_is_taken_for_the_same_labels_only(tmp_path: Path) -> None:
    def weights(labels):
        return SimpleNamespace(model=replace(CONFIG, labels=labels), facts=SimpleNamespace(origin="there"))

    assert not has_head(LABELS, weights(())) and has_head(LABELS, weights(LABELS))
    assert has_head(LABELS, weights(("LABEL_0", "LABEL_1", "LABEL_2")))
    for other in (("yes", "no", "perhaps"), ("LABEL_0", "LABEL_1"), ("no", "yes")):
        with pytest.raises(ForgeError, match=r"there is a classifier of . labels, .*begin with a new head: .*\['head.weight'\]"):
            has_head(LABELS, weights(other))
