"""Stored logits of a teacher: the loss of the teacher itself, rows by their content, and damage."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge_core.batch import IGNORE, PADDING, Batch
from forge_core.errors import ForgeError
from forge_models.distillation import STORED_LOGITS, STORED_WORDS, DistillationLoss, top_logits
from forge_models.teacher_logits import StoredTeacherLogits, TeacherFacts, TeacherLogitsWriter, row_keys

FACTS = TeacherFacts("a" * 64, "b" * 64, 97, 6, {"sequence_length": 18, "packing": "pad", "documents": "mask", "sources": []})


def batch_of(tokens) -> Batch:
    ids, labels = tokens(4, 18), tokens(4, 18, seed=2)
    labels[0, 4:9], labels[1, 15:], labels[3] = IGNORE, IGNORE, IGNORE
    documents = (torch.arange(18) >= torch.tensor([[7], [18], [3], [18]])).int()
    documents[2, 16:] = PADDING
    labels[2, 15:] = IGNORE
    positions = torch.arange(18).expand(4, 18) - torch.where(documents == 0, 0, torch.tensor([[7], [18], [3], [18]]))
    return Batch(ids, labels, positions.int(), documents)


def written(folder: Path, teacher, batch: Batch, top_k: int = 6, rows: int = 4) -> StoredTeacherLogits:
    dtype = next(teacher.parameters()).dtype
    with TeacherLogitsWriter(folder, FACTS._replace(top_k=top_k), dtype) as writer:
        for first in range(0, 4, rows):
            part = rows_of(batch, first, first + rows)
            writer.add(part, *top_logits(teacher, part, top_k))
            writer.add(part, *top_logits(teacher, part, top_k))  # rows of several epochs or sets are there once
    assert (writer.rows, writer.labels) == (3, int((batch.labels != IGNORE).sum()))
    return StoredTeacherLogits(folder)


def rows_of(batch: Batch, first: int, after: int) -> Batch:
    cut = {name: getattr(batch, name)[first:after] for name in ("tokens", "labels", "positions", "documents")}
    return replace(batch, **cut)


def terms_of(model, batch: Batch, objective: DistillationLoss):
    ready = objective.prepared(batch)
    terms = model(
        ready.tokens, positions=ready.positions, documents=ready.documents, labels=ready.labels, objective=objective.bound(ready)
    )
    return terms, torch.autograd.grad(terms.sum, list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("kept", "temperature", "weight"), [(6, 1.0, 1.0), (6, 2.5, 0.6), (3, 0.7, 0.6)])
def test_loss_and_gradients_are_those_of_the_teacher(make, tokens, tmp_path, dtype, kept, temperature, weight) -> None:
    student = make(dtype=dtype, spread=8.0, soft_cap=3.0)
    teacher = make(seed=1, dtype=dtype, spread=6.0, dim=24, layers=1, ffn_dim=20)
    batch = batch_of(tokens)
    settings = {"weight": weight, "temperature": temperature, "top_k": kept}
    wanted, gradients = terms_of(student, batch, DistillationLoss(**settings).with_teacher(teacher))
    stored = DistillationLoss(**settings).with_stored(written(tmp_path / "store", teacher, batch))
    found, others = terms_of(student, batch, stored)
    assert torch.equal(found.sum, wanted.sum) and torch.equal(found.rows, wanted.rows)
    assert all(torch.equal(one, other) for one, other in zip(others, gradients, strict=True))
    assert {name: float(value) for name, value in found.metrics.items()} == {n: float(v) for n, v in wanted.metrics.items()}


def test_rows_are_found_by_their_content_in_any_order(make, tokens, tmp_path) -> None:
    teacher, batch = make(dtype=torch.float64, spread=6.0), batch_of(tokens)
    store = written(tmp_path / "store", teacher, batch, rows=1)
    objective = DistillationLoss(weight=1.0, top_k=2).with_stored(store)
    whole = objective.prepared(batch).targets
    for row in range(4):
        alone = objective.prepared(rows_of(batch, row, row + 1)).targets
        assert all(torch.equal(alone[name][0], whole[name][row]) for name in (STORED_WORDS, STORED_LOGITS))
    with torch.no_grad():
        logits = teacher(batch.tokens, positions=batch.positions, documents=batch.documents)
    keep = batch.labels != IGNORE
    best = logits[keep].sort(1, descending=True)
    assert torch.equal(whole[STORED_WORDS][keep].long(), best.indices[:, :2])
    torch.testing.assert_close(whole[STORED_LOGITS][keep], best.values[:, :2], rtol=1e-12, atol=1e-12)
    known = row_keys(batch)[0]
    assert store.of_row(known) is not None and store.of_row(known[:8] + bytes(8)) is store.of_row(bytes(16)) is None
    assert len(set(row_keys(batch))) == 4 and objective.prepared(objective.prepared(batch)).targets.keys() == whole.keys()


@pytest.mark.parametrize("what", ["tokens", "labels", "documents"])
def test_other_rows_are_refused(make, tokens, tmp_path, what) -> None:
    batch = batch_of(tokens)
    objective = DistillationLoss(top_k=2).with_stored(written(tmp_path / "store", make(), batch))
    changed = getattr(batch, what).clone()
    changed[1, 3] += 1
    with pytest.raises(ForgeError, match=r"does not have the row of sample 41; .*run it again"):
        objective.prepared(replace(batch, samples=(40, 41, 42, 43), **{what: changed}))


def test_a_store_with_fewer_words_is_refused(make, tokens, tmp_path) -> None:
    store = written(tmp_path / "store", make(), batch_of(tokens))
    with pytest.raises(ForgeError, match="has the 6 most likely words, not 7; set it to at most 6"):
        DistillationLoss(top_k=7).with_stored(store)
    with pytest.raises(ForgeError, match="not all"):
        DistillationLoss().with_stored(store)


@pytest.mark.parametrize("name", ["keys.bin", "words.bin", "logits.bin"])
def test_damage_is_refused(make, tokens, tmp_path, name) -> None:
    written(tmp_path / "store", make(), batch_of(tokens))
    path = tmp_path / "store" / name
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ForgeError, match=f"{name} is damaged"):
        StoredTeacherLogits(tmp_path / "store")
    path.unlink()
    with pytest.raises(ForgeError, match=r"cannot be read.*forge-train teach"):
        StoredTeacherLogits(tmp_path / "store")


def test_what_is_no_store_is_refused(make, tokens, tmp_path) -> None:
    with pytest.raises(ForgeError, match="give a folder that forge-train teach has written"):
        StoredTeacherLogits(tmp_path)
    written(tmp_path / "store", make(), batch_of(tokens))
    path = tmp_path / "store" / "manifest.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"format": 2}))
    with pytest.raises(ForgeError, match="has format 2, but this version reads 1"):
        StoredTeacherLogits(tmp_path / "store")
    del document["sha256"]
    path.write_text(json.dumps(document))
    with pytest.raises(ForgeError, match=r"has no valid manifest\.json"):
        StoredTeacherLogits(tmp_path / "store")
    with pytest.raises(ForgeError, match="exists; choose another folder"):
        written(tmp_path / "store", make(), batch_of(tokens))


def test_an_error_leaves_nothing(make, tokens, tmp_path) -> None:
    batch = batch_of(tokens)
    with pytest.raises(RuntimeError), TeacherLogitsWriter(tmp_path / "store", FACTS, torch.float32) as writer:
        writer.add(batch, *top_logits(make(), batch, 6))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
