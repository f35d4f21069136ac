"""DPO against its formula on whole logits, and against trl; the pairs of a batch; packing."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from forge_core.batch import IGNORE, PADDING, Batch
from forge_core.errors import DataError
from forge_models.blocks.head import ChunkedCrossEntropy, Head
from forge_models.objectives import DPO
from forge_models.preference import REFERENCE, AnswerScores, PreferenceLoss, ReferenceTable, pairs_of
from models.test_against_transformers import llama, llama_name

LOSSES = {
    "sigmoid": DPO(),
    "strong": DPO(beta=0.7),
    "smoothed": DPO(label_smoothing=0.2),
    "robust": DPO(loss="robust", label_smoothing=0.2),
    "ipo": DPO(loss="ipo", beta=0.3),
    "nll": DPO(nll=0.7),
}
LENGTHS = ((5, 3, 4), (2, 6, 1), (4, 1, 3), (3, 4, 4), (6, 2, 5))
"""Tokens of the prompt, the chosen and the rejected answer of each pair."""


def documents_of(vocab: int = 97) -> list[tuple[torch.Tensor, int]]:
    """Two documents for each pair, and the tokens of its prompt."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for prompt, *answers in LENGTHS:
        asked = torch.randint(vocab, (prompt,), generator=draw)
        found += [(torch.cat((asked, torch.randint(vocab, (length,), generator=draw))), prompt) for length in answers]
    return found


def packed(rows: list[list[int]], length: int = 96) -> Batch:
    """Rows of these pairs."""
    every = documents_of()
    tokens, labels = torch.zeros(len(rows), length, dtype=torch.int64), torch.full((len(rows), length), IGNORE)
    documents = torch.full((len(rows), length), PADDING, dtype=torch.int32)
    positions = torch.zeros(len(rows), length, dtype=torch.int32)
    for row, pairs in enumerate(rows):
        at = 0
        for number, (ids, prompt) in enumerate(every[2 * pair + side] for pair in pairs for side in (0, 1)):
            here = slice(at, at + len(ids))
            tokens[row, here], documents[row, here] = ids, number
            positions[row, here] = torch.arange(len(ids), dtype=torch.int32)
            labels[row, at + prompt - 1 : at + len(ids) - 1] = ids[prompt:]
            at += len(ids)
    return Batch(tokens, labels, positions, documents)


def answer_scores(model, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """log p of an answer, from the whole logits of its document alone."""
    logits = model(ids[None])[0].log_softmax(-1)
    return logits[prompt - 1 : -1].gather(1, ids[prompt:, None]).sum()


def table_of(model) -> dict:
    """The table of a reference, worked out document by document."""
    batch = packed([[pair] for pair in range(len(LENGTHS))])
    every = documents_of()
    with torch.no_grad():
        scores = [float(answer_scores(model, *document)) for document in every]
    return {pair.key: (scores[2 * pair.row], scores[2 * pair.row + 1]) for pair in pairs_of(batch)}


def entries_of(table: dict) -> bytes:
    return b"".join(ReferenceTable.entry(key, *scores) for key, scores in table.items())


def by_formula(component: DPO, model, reference) -> torch.Tensor:
    """The sum over pairs, from whole logits."""
    every, total = documents_of(), torch.zeros((), dtype=torch.float64)
    for at in range(0, len(every), 2):
        gained = [
            answer_scores(model, *document) - answer_scores(reference, *document).detach() for document in every[at : at + 2]
        ]
        d = gained[0] - gained[1]
        a, beta = component.label_smoothing, component.beta
        right, wrong = -torch.log(torch.sigmoid(beta * d)), -torch.log(torch.sigmoid(-beta * d))
        if component.loss == "ipo":
            means = [ratio / (len(ids) - prompt) for ratio, (ids, prompt) in zip(gained, every[at : at + 2], strict=True)]
            total = total + (means[0] - means[1] - 1 / (2 * beta)) ** 2
        elif component.loss == "robust":
            total = total + ((1 - a) * right - a * wrong) / (1 - 2 * a)
        else:
            total = total + (1 - a) * right + a * wrong
        ids, prompt = every[at]
        total = total - component.nll * answer_scores(model, ids, prompt) / (len(ids) - prompt)
    return total


def run(component: DPO, model, table: dict, batches: list[Batch]):
    """Sum, count, metrics and gradients of a model over some micro-batches."""
    objective = component.build().with_reference(entries_of(table))
    model.zero_grad()
    total, count, metrics = 0.0, 0, {}
    for batch in batches:
        ready = objective.prepared(batch)
        terms = model(
            ready.tokens,
            positions=ready.positions,
            documents=ready.documents,
            labels=ready.labels,
            objective=objective.bound(ready),
        )
        terms.sum.backward()
        torch.testing.assert_close(terms.rows.sum(), terms.sum.detach())
        assert int(objective.counts(ready).sum()) == int(terms.tokens)
        total, count = total + float(terms.sum.detach()), count + int(terms.tokens)
        metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in terms.metrics.items()}
    return total, count, metrics, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_equal_the_formula_however_pairs_are_packed(make, name) -> None:
    model, reference = (make(seed=seed, dtype=torch.float64, spread=8.0, max_length=96) for seed in (0, 1))
    component = LOSSES[name]
    expected = by_formula(component, model, reference)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    for rows in ([[[0], [1], [2], [3], [4]]], [[[0, 3, 1]], [[4], [2]]], [[[4, 2, 1, 3, 0]]]):
        total, count, metrics, gradients = run(component, model, table_of(reference), [packed(batch) for batch in rows])
        assert count == len(LENGTHS)
        assert total == pytest.approx(float(expected.detach()), rel=1e-12)
        for (parameter, found), right in zip(gradients.items(), wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-11, msg=lambda text, at=parameter: f"{at}: {text}")
        assert metrics["margin"] == pytest.approx(metrics["chosen"] - metrics["rejected"])
        assert metrics["accuracy"] == int(metrics["accuracy"]) and 0 <= metrics["accuracy"] <= count


def test_a_model_that_is_its_reference_has_log_2(make) -> None:
    model = make(dtype=torch.float64, spread=8.0, max_length=96)
    total, count, metrics, _ = run(DPO(), model, table_of(model), [packed([[0, 1], [2, 3, 4]])])
    assert total / count == pytest.approx(0.6931471805599453, rel=1e-12) and metrics["margin"] == pytest.approx(0, abs=1e-12)


def test_a_split_vocabulary_has_the_same_loss(make) -> None:
    """As tensor parallelism splits it: ranks of 40 and 57 words, whose gradients add up."""
    draw = torch.Generator().manual_seed(3)
    batch = DPO().build().with_targets(packed([[0, 1], [2, 3]]))
    hidden, weight = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((2, 96, 6), (97, 6)))
    objective = DPO(beta=0.5).build().bound(batch)

    def scored(core, weight):
        head = Head(6, 97, 0.02)
        head.weight, head.core = torch.nn.Parameter(weight), core
        x = hidden.clone().requires_grad_()
        terms = objective(head, x, batch.labels)
        return terms.sum.detach(), *torch.autograd.grad(terms.sum, (x, head.weight))

    whole = scored(ChunkedCrossEntropy(16), weight)
    bounds, told = ((0, 40), (40, 97)), []
    for first, end in bounds:
        mine: list[torch.Tensor] = []
        one = ChunkedCrossEntropy(16).split(first, lambda numbers, mine=mine: mine.append(numbers) or numbers.unsqueeze(0))
        # both passes tell the same numbers: the first one is enough
        one(hidden.flatten(0, 1), weight[first:end], batch.labels.flatten(), 0.0, None)
        told.append(mine)
    found = []
    for first, end in bounds:
        turn = iter([*range(len(told[0]))] * 2)
        one = ChunkedCrossEntropy(16).split(
            first, lambda _, turn=turn: (lambda at: torch.stack([t[at] for t in told]))(next(turn))
        )
        found.append(scored(one, weight[first:end]))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][0], whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0][1] + found[1][1], whole[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([found[0][2], found[1][2]]), whole[2], rtol=1e-12, atol=1e-12)


def test_scores_of_a_reference_are_those_of_its_documents_alone(make) -> None:
    model, every = make(dtype=torch.float64, spread=8.0, max_length=96), documents_of()
    batch = packed([[0, 3, 1], [2]])
    with torch.no_grad():
        terms = model(
            batch.tokens,
            positions=batch.positions,
            documents=batch.documents,
            labels=batch.labels,
            objective=AnswerScores().bound(batch),
        )
        alone = [answer_scores(model, *every[at]) for at in (0, 1, 6, 7, 2, 3)]
    torch.testing.assert_close(terms.metrics["documents"][0], torch.stack(alone), rtol=1e-12, atol=1e-12)
    assert terms.metrics["documents"][1, 2:].tolist() == [0.0] * 4
    table, wanted = ReferenceTable(AnswerScores().entries(batch, terms)), table_of(model)
    for pair in pairs_of(batch):
        assert table.find(pair.key).tolist() == pytest.approx(wanted[pair.key], rel=1e-12)  # type: ignore[union-attr]


def test_a_table_tells_keys_with_the_same_first_half_apart() -> None:
    keys = [(5, 1), (5, -7), (-(2**63), 3), (2**63 - 1, 3), (5, 9)]
    table = ReferenceTable(entries_of({key: (-float(at), at / 3) for at, key in enumerate(keys)}))
    for at, key in enumerate(keys):
        assert table.find(key).tolist() == [-at, at / 3]  # type: ignore[union-attr]
    assert table.find((5, 2)) is None and table.find((6, 1)) is None and ReferenceTable(b"").find((5, 1)) is None


def test_keys_are_those_of_the_content() -> None:
    keys = [pair.key for pair in pairs_of(packed([[0], [1], [2]]))]
    assert len(set(keys)) == 3
    assert [pair.key for pair in pairs_of(packed([[1, 0], [2]], length=40))] == [keys[1], keys[0], keys[2]]
    changed = packed([[0]])
    changed.labels[0, LENGTHS[0][0] - 1] = IGNORE  # one trained token less
    assert next(iter(pairs_of(changed))).key != keys[0]
    moved = packed([[0]])
    moved.documents[0, sum(LENGTHS[0][:2]) - 1] = 1  # the border between the two answers
    assert next(iter(pairs_of(moved))).key != keys[0]


def test_pairs_without_a_label_on_one_side_count_nothing(make) -> None:
    model = make(dtype=torch.float64, spread=8.0, max_length=96)
    batch = packed([[0, 1]])
    batch.labels[0, batch.documents[0] == 3] = IGNORE
    objective = PreferenceLoss()
    batch = replace(batch, targets={REFERENCE: torch.zeros(1, 4, dtype=torch.float64)})
    assert objective.counts(batch).tolist() == [1]
    full, _, _, both = run(DPO(), model, table_of(model), [packed([[0]])])
    terms = model(
        batch.tokens,
        positions=batch.positions,
        documents=batch.documents,
        labels=batch.labels,
        objective=PreferenceLoss().bound(replace(batch, targets={REFERENCE: _reference(model)})),
    )
    model.zero_grad()
    terms.sum.backward()
    assert float(terms.sum.detach()) == pytest.approx(full, rel=1e-12) and int(terms.tokens) == 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, both[name], rtol=1e-10, atol=1e-12)


def _reference(model) -> torch.Tensor:
    (pair,) = pairs_of(packed([[0]]))
    return torch.tensor([[*table_of(model)[pair.key], 0.0, 0.0]], dtype=torch.float64)


def test_what_cannot_be_scored_is_refused() -> None:
    batch = packed([[0, 1]])
    with pytest.raises(DataError, match=r"give them with objective\.with_reference"):
        PreferenceLoss().prepared(batch)
    with pytest.raises(DataError, match="has no log-probability under the reference"):
        PreferenceLoss().with_reference(b"").prepared(batch)
    with pytest.raises(DataError, match="prepare it with"):
        PreferenceLoss().bound(batch)
    with pytest.raises(DataError, match=r"call objective\.bound"):
        PreferenceLoss()(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"data\.documents = 'mask'"):
        list(pairs_of(replace(batch, documents=None)))
    batch.documents[0, batch.documents[0] == 3] = PADDING
    with pytest.raises(DataError, match="has 3 documents"):
        list(pairs_of(batch))
    with pytest.raises(ValueError, match="no effect with loss = 'ipo'"):
        DPO(loss="ipo", label_smoothing=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid", "robust", "ipo"])
def test_loss_and_gradients_equal_trl(make, tmp_path, name) -> None:
    """trl's own trainer on its own batch. It computes log-probabilities in fp32, which limits the comparison."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from trl import DPOConfig, DPOTrainer  # pyright: ignore[reportMissingImports]

        words = {word: index for index, word in enumerate(["<pad>", "<eos>", *(f"w{index}" for index in range(95))])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        component = LOSSES[name]
        ours, frozen = (make(seed=seed, dtype=torch.float64, spread=8.0, max_length=96) for seed in (0, 1))
        twin, reference = llama(ours).double(), llama(frozen).double()
        draw = torch.Generator().manual_seed(1)

        def text(count: int) -> str:
            return " ".join(f"w{index}" for index in torch.randint(95, (count,), generator=draw).tolist())

        rows = [{"prompt": f"{text(a)} ", "chosen": text(b), "rejected": text(c)} for a, b, c in LENGTHS]
        options = DPOConfig(
            output_dir=str(tmp_path),
            report_to=[],
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=len(rows),
            beta=component.beta,
            loss_type=[component.loss],
            label_smoothing=component.label_smoothing,
            gradient_checkpointing=False,
        )
        trainer = DPOTrainer(
            model=twin,
            ref_model=reference,
            args=options,
            train_dataset=Dataset.from_list(rows),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"),
        )
        given = next(iter(trainer.get_train_dataloader()))
        loss: torch.Tensor = trainer.compute_loss(trainer.model, given)  # type: ignore[assignment]
        loss.backward()
    batch, table = _as_forge(given, frozen)
    total, count, _, gradients = run(component, ours, table, [batch])
    assert count == len(rows) and total / count == pytest.approx(float(loss.detach()), rel=2e-6)
    theirs = dict(twin.named_parameters())
    for at, gradient in gradients.items():
        expected = theirs[llama_name(at)].grad
        torch.testing.assert_close(gradient / count, expected, rtol=2e-5, atol=2e-6 * float(expected.abs().max()), msg=at)


def _as_forge(given, reference) -> tuple[Batch, dict]:
    """The batch of trl, whose first half of rows are chosen, as rows of one pair each."""
    half, width = len(given["input_ids"]) // 2, given["input_ids"].shape[1]
    tokens, labels = torch.zeros(half, 2 * width, dtype=torch.int64), torch.full((half, 2 * width), IGNORE)
    documents = torch.full((half, 2 * width), PADDING, dtype=torch.int32)
    positions, scores = torch.zeros(half, 2 * width, dtype=torch.int32), []
    for pair in range(half):
        at = 0
        for side, row in enumerate((pair, pair + half)):
            length = int(given["attention_mask"][row].sum())
            ids, prompt = given["input_ids"][row, :length], int((given["completion_mask"][row, :length] == 0).sum())
            tokens[pair, at : at + length], documents[pair, at : at + length] = ids, side
            positions[pair, at : at + length] = torch.arange(length)
            labels[pair, at + prompt - 1 : at + length - 1] = ids[prompt:]
            with torch.no_grad():
                scores.append(
                    float(F.log_softmax(reference(ids[None])[0], -1)[prompt - 1 : -1].gather(1, ids[prompt:, None]).sum())
                )
            at += length
    batch = Batch(tokens, labels, positions, documents)
    return batch, {pair.key: (scores[2 * pair.row], scores[2 * pair.row + 1]) for pair in pairs_of(batch)}
