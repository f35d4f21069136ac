"""Conversations from files to trained rows: stores, their masks, packing and truncation."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.chat.templates import SIX, marked
from data.tokenizers.kinds import KINDS, fast
from forge_core.batch import IGNORE, PADDING, Batch
from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext, SourceWithMask
from forge_data import Bpe, Conversations, Data, TokenStore, evaluation, open_stream
from forge_data.chat.conversation import Chat
from forge_data.chat.formats import examples_of
from forge_data.chat.masks import ExampleEncoder
from forge_data.preparation import job, tokenization
from forge_data.sources.records import Skips
from forge_data.sources.store import MASKED, MaskEntry, StoreSource, open_store, read_manifest
from forge_data.sources.store_writer import StoreWriter
from forge_train.recipe.load import load_recipe

TOKENS = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "pad_token": "</s>"}
MODEL = load_recipe("debug", ["--model.vocab_size=400", "--model.max_length=160"]).job.model
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "ran", "to", "the", "park"]


def talk(number: int, answers: int = 2) -> dict[str, Any]:
    """A conversation whose answers differ in length."""
    words = [
        " ".join(WORDS[(number + at) % len(WORDS)] for at in range(1 + (number * 7 + turn * 3) % 9))
        for turn in range(2 * answers)
    ]
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[turn % 2], "content": f"{text} {number}"} for turn, text in enumerate(words)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers saves it: a tokenizer, its names of tokens, and a template without tags."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = fast(KINDS["byte_level"](), **TOKENS)
    tokenizer.chat_template = marked(SIX["chatml"]).replace("{% generation %}", "").replace("{% endgeneration %}", "")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def context(folder: Path, tmp_path: Path) -> SourceContext:
    tokenizer = Bpe(path=str(folder / "tokenizer.json"), eos="<|im_end|>")
    empty = SourceContext(tmp_path / "workspace", None, 160, lambda _: None)
    return replace(empty, tokenizer=tokenizer.build(empty))


def written(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return str(path)


def data_of(folder: Path, *sources: Any, **more: Any) -> Data:
    tokenizer = Bpe(path=str(folder / "tokenizer.json"), eos="<|im_end|>")
    settings: dict[str, Any] = {"sequence_length": 160, "packing": "best_fit", "shuffle": "none"} | more
    return Data(sources=list(sources), tokenizer=tokenizer, **settings)


def step(data: Data, workspace: Path, rows: int) -> Batch:
    stream = open_stream(data, workspace=workspace, seed=1, global_batch=rows, micro_batch=rows)
    batches, _ = next(iter(stream.from_cursor(stream.start())))
    return batches[0]


def documents_of(source: Any) -> list[tuple[list[int], list[bool]]]:
    ends = source.ends().astype(int).tolist()
    return [(source.read(a, b).tolist(), source.learned(a, b).tolist()) for a, b in zip([0, *ends], ends, strict=False)]


def test_a_store_has_the_tokens_and_the_mask_of_every_record(folder: Path, context: SourceContext, tmp_path: Path) -> None:
    records = [talk(number) for number in range(30)]
    said: list[str] = []
    source: Any = Conversations(path=written(tmp_path / "talks.jsonl", records)).build(replace(context, report=said.append))
    assert isinstance(source, SourceWithMask) and not source.pairs
    chat = Chat((folder / "chat_template.jinja").read_text(), tuple(sorted(TOKENS.items())), complete=True)
    encoder = ExampleEncoder(chat, context.tokenizer, [context.tokenizer.eos])  # type: ignore[arg-type, union-attr]
    wanted = [encoder.encode(examples_of(record, "messages")[0]) for record in records]
    assert documents_of(source) == [(each.ids.tolist(), each.learned.tolist()) for each in wanted]
    mask = source.manifest.mask
    trained = sum(int(each.learned.sum()) for each in wanted)
    end = str(context.tokenizer.eos)  # type: ignore[union-attr]
    assert (mask.turns, mask.ended, mask.trained, mask.layout) == (60, 60, trained, "rows")
    assert mask.stops == {end: [60, 120]} and source.counts().sum() == trained and source.counts()[int(end)] == 60
    assert source.verify() == [] and json.loads((source.path / "manifest.json").read_text())["version"] == MASKED
    assert any(
        f"{trained / source.tokens:.1%} of them trained (60 turns, 60 of which end with a stop token)" in line for line in said
    )


def test_all_kinds_of_files_are_read_and_any_number_of_workers_writes_the_same(
    context: SourceContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow
    from pyarrow import parquet

    records = [talk(number) for number in range(40)]
    plain = written(tmp_path / "a.jsonl", records)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(Path(plain).read_text())
    (tmp_path / "c.json").write_text(json.dumps(records))
    table = pyarrow.Table.from_pylist(records)
    parquet.write_table(table, tmp_path / "d.parquet", row_group_size=7)
    with pyarrow.OSFile(str(tmp_path / "e.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    first = documents_of(Conversations(path=plain).build(context))
    for name in ("b.jsonl.gz", "c.json", "d.parquet", "e.arrow"):
        assert documents_of(Conversations(path=str(tmp_path / name)).build(context)) == first, name
    monkeypatch.setattr(tokenization, "SMALLEST_PART", 1500)
    monkeypatch.setattr(job, "CHUNK", 100)
    together: Any = Conversations(path=plain).records(context.tokenizer)
    assert len(together.parts(1500)) > 3
    for name, more in (("threads", {"workers": 3}), ("processes", {"workers": 2, "processes": True})):
        store = tokenization.tokenize(
            together, context.tokenizer, tmp_path / name, source="x", report=lambda _: None, shard_tokens=300, **more
        )  # type: ignore[arg-type]
        assert documents_of(store) == first and len(store.manifest.shards) > 2 and store.verify() == []


def test_a_damaged_mask_of_a_finished_part_is_written_again(tmp_path: Path) -> None:
    portion = job.EncodedDocuments(np.array([1, 2, 3]), np.array([3]), 0, np.array([False, True, True]), 1, 1)
    done = job.write_part(tmp_path, 0, "uint16", [portion], Skips())
    content_of = job.content_of(tmp_path, 0, "uint16", done)
    assert content_of is not None and content_of[2] is not None and content_of[2].tolist() == [0, 1, 1]
    assert job.finished(tmp_path, 0) == done and (done.turns, done.ended) == (1, 1)
    (tmp_path / "000000.learned").write_bytes(bytes([1, 1, 1]))
    assert job.content_of(tmp_path, 0, "uint16", done) is None


def test_struct_columns_do_not_invent_fields(tmp_path: Path) -> None:
    """A column of structs has all fields in all rows, so a call would have the arguments of all others."""
    import pyarrow
    from pyarrow import parquet

    from forge_data.chat.records import cut, rows
    from forge_data.storage.files import find

    calls = [{"messages": [{"role": "user", "content": "x", "call": {"arguments": {key: 1}}}]} for key in ("a", "b")]
    parquet.write_table(pyarrow.Table.from_pylist(calls), tmp_path / "calls.parquet")
    (part,) = cut(find(str(tmp_path / "calls.parquet"), (), ""), 1 << 20)
    assert [record for _, _, record in rows(part)] == calls


def test_labels_are_the_trained_tokens_and_training_on_a_store_needs_no_jinja(
    folder: Path, context: SourceContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "talks.jsonl", [talk(number) for number in range(12)])
    source: Any = Conversations(path=path).build(context)
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    for name in [name for name in __import__("sys").modules if name == "forge_data.chat.template"]:
        monkeypatch.delitem(__import__("sys").modules, name)
    with pytest.raises(DataError, match=r"chat templates need jinja2; pip install 'forge-data\[chat\]'"):
        Chat().render([]) or Chat().marks
    batch = step(data_of(folder, TokenStore(path=str(source.path))), tmp_path / "one", 6)
    assert batch.documents is not None
    seen = 0
    by_ids = {tuple(ids): mask for ids, mask in documents_of(source)}
    for tokens, labels, documents in zip(batch.tokens, batch.labels, batch.documents, strict=True):
        for number in range(int(documents.max()) + 1):
            place = (documents == number).nonzero().flatten()
            ids = tokens[place].tolist()
            mask = by_ids[tuple(ids)]
            wanted = [index if trained else IGNORE for index, trained in zip(ids[1:], mask[1:], strict=True)] + [IGNORE]
            assert labels[place].tolist() == wanted
            seen += 1
        assert (labels[documents == PADDING] == IGNORE).all()
    assert seen > 6


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_packing_does_not_change_gradients(packing: str, folder: Path, context: SourceContext, tmp_path: Path) -> None:
    """The mean over the trained tokens of packed rows has the gradients of the mean over conversations that are alone."""
    component = Conversations(path=written(tmp_path / "talks.jsonl", [talk(number) for number in range(12)]))
    source: Any = component.build(context)
    rows = 12 if packing == "pad" else None
    data = data_of(folder, component, packing=packing)
    stream = open_stream(data, workspace=tmp_path / "w", seed=1, global_batch=1, micro_batch=1)
    count = stream.order.samples.rows[0]  # type: ignore[union-attr]
    assert count == rows if rows else count < 12
    batch = step(data, tmp_path / "w", count)
    torch.manual_seed(1)
    model: Any = MODEL.build().double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)

    def gradients(parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        model.zero_grad()
        total: Any = sum(
            torch.nn.functional.cross_entropy(
                model(tokens, positions=places, documents=numbers).flatten(0, 1),
                labels.flatten(),
                ignore_index=IGNORE,
                reduction="sum",
            )
            for tokens, labels, places, numbers in parts
        )
        (total / sum(int((labels != IGNORE).sum()) for _, labels, _, _ in parts)).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    assert batch.positions is not None and batch.documents is not None
    packed = gradients([(batch.tokens, batch.labels, batch.positions.long(), batch.documents)])
    alone = []
    for ids, mask in documents_of(source):
        labels = [index if trained else IGNORE for index, trained in zip(ids[1:], mask[1:], strict=True)] + [IGNORE]
        alone.append(
            (
                torch.tensor([ids]),
                torch.tensor([labels]),
                torch.arange(len(ids))[None],
                torch.zeros(1, len(ids), dtype=torch.int32),
            )
        )
    separate = gradients(alone)
    assert len(packed) == len(separate) > 5
    for one, other in zip(packed, separate, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    assert any(bool(grad.abs().max() > 1e-3) for grad in packed)


def test_long_conversations_are_refused_left_out_or_cut_and_counted(folder: Path, context: SourceContext, tmp_path: Path) -> None:
    long = talk(3, answers=8)
    path = written(tmp_path / "talks.jsonl", [talk(0), long, talk(1)])
    source: Any = Conversations(path=path).build(context)
    ids, _ = documents_of(source)[1]
    assert len(ids) > 160
    where = f"talks.jsonl:{len(json.dumps(talk(0))) + 1}"

    def opened(**more: Any) -> list[str]:
        said: list[str] = []
        data = data_of(folder, Conversations(path=path, **more), packing="pad")
        open_stream(data, workspace=tmp_path / "w", seed=1, global_batch=1, micro_batch=1, report=said.append)
        return said

    with pytest.raises(DataError, match=rf"document 2 \({where}\) has {len(ids)} tokens, but a row has 160; shorten"):
        opened()
    assert any(
        "3 documents in 2 rows" in line and "1 documents longer than a row were left out" in line
        for line in opened(too_long="skip")
    )
    assert any(
        "3 documents in 3 rows" in line and "1 documents longer than a row were cut" in line
        for line in opened(too_long="truncate")
    )
    with pytest.raises(DataError, match=r"have a loss mask, and packing = 'concatenate' would cut"):
        open_stream(
            data_of(folder, TokenStore(path=str(source.path)), packing="concatenate"),
            workspace=tmp_path,
            seed=1,
            global_batch=1,
            micro_batch=1,
        )
    with pytest.raises(DataError, match=r"document 2 .* has .* tokens, but a row has 160"):
        open_stream(data_of(folder, TokenStore(path=str(source.path))), workspace=tmp_path, seed=1, global_batch=1, micro_batch=1)


def test_a_conversation_that_is_cut_before_its_first_answer_is_refused(folder: Path, tmp_path: Path) -> None:
    question = {"role": "user", "content": "why " * 100}
    path = written(tmp_path / "talks.jsonl", [talk(0), {"messages": [question, {"role": "assistant", "content": "So."}]}])
    data = data_of(folder, Conversations(path=path, too_long="truncate"))
    with pytest.raises(
        DataError, match=r"document 2 \(talks.jsonl:[0-9]+\) has nothing to train on in its first 160 tokens.*raise data.seq"
    ):
        open_stream(data, workspace=tmp_path, seed=1, global_batch=1, micro_batch=1)
    assert open_stream(
        data_of(folder, Conversations(path=path, too_long="skip")), workspace=tmp_path, seed=1, global_batch=1, micro_batch=1
    )


def test_broken_records_are_named_counted_and_skipped(context: SourceContext, tmp_path: Path) -> None:
    records = [talk(0), {"messages": []}, {"messages": [{"role": "user", "content": "x"}]}, talk(1)]
    path = written(tmp_path / "talks.jsonl", records)
    with pytest.raises(DataError, match=r"at byte [0-9]+ \(line 2\) has an empty conversation; correct or remove it, or allow"):
        Conversations(path=path).build(context)
    said: list[str] = []
    source: Any = Conversations(path=path, skip=2).build(replace(context, report=said.append))
    assert len(documents_of(source)) == 2 and any("left out 2 broken records" in line for line in said)
    Path(path).write_text(Path(path).read_text() + "{\n")
    with pytest.raises(DataError, match=r"\(line 5\) is not valid JSON"):
        Conversations(path=path, skip=2).build(context)
    (tmp_path / "list.json").write_text('{"messages": 1}')
    with pytest.raises(DataError, match="is not a JSON list"):
        Conversations(path=str(tmp_path / "list.json")).build(context)
    silent = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match=r"\(line 1\): the chat template writes none of the assistant's words"):
        Conversations(path=path, template=silent).build(context)
    drops = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"\(line 1\): the chat template (leaves out|changes earlier)"):
        Conversations(path=path, template=drops).build(context)


def test_a_template_whose_answers_end_with_no_stop_token_is_refused(folder: Path, context: SourceContext, tmp_path: Path) -> None:
    path = written(tmp_path / "talks.jsonl", [talk(0)])
    with pytest.raises(DataError, match=r"none of 2 trained turns ends with a stop token; .*set data.tokenizer.eos to the token"):
        Conversations(path=path, stop=("</s>",)).build(context)
    other: Any = replace(context, tokenizer=Bpe(path=str(folder / "tokenizer.json"), eos="</s>").build(context))
    own: Any = Conversations(path=path).build(other)
    assert own.manifest.mask.ended == 2, "the folder names its stop token itself"
    with pytest.raises(DataError, match=r"the stop token '<\|end\|>' is not one token of the tokenizer"):
        Conversations(path=path, stop=("<|end|>",)).build(context)


def test_stop_tokens_are_those_at_which_generation_stops(folder: Path, context: SourceContext, tmp_path: Path) -> None:
    from forge_data.chat.records import settings_for

    assert settings_for(context.tokenizer, "messages", "all", None, None, ()).stops == (context.tokenizer.eos,)  # type: ignore[union-attr]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, null, true, 6]}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    for template in (str(tmp_path), str(tmp_path / "chat_template.jinja")):
        found = settings_for(context.tokenizer, "messages", "all", None, template, ())
        assert found.stops == (5, 6, context.tokenizer.eos)  # type: ignore[union-attr]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "pad_token": "<unk>"}')
    found = settings_for(context.tokenizer, "messages", "all", None, str(tmp_path), ())
    ids = [int(context.tokenizer.encode_pieces([(each, True)])[0][0]) for each in ("</s>", "<unk>")]  # type: ignore[union-attr]
    assert found.stops == (5, 6, ids[0], context.tokenizer.eos) and found.pad == ids[1]  # type: ignore[union-attr]
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(DataError, match=r"generation_config\.json is not a JSON object"):
        settings_for(context.tokenizer, "messages", "all", None, str(tmp_path), ())
    with pytest.raises(DataError, match=r"needs a tokenizer; set data\.tokenizer\.path"):
        settings_for(None, "messages", "all", None, None, ())
    bare: Any = Bpe(path=str(folder / "tokenizer.json"), eos="</s>").build(context)
    bare.folder, bare.special_tokens = None, {}
    with pytest.raises(DataError, match="a conversation needs a chat template; set template to the folder"):
        Conversations(path=written(tmp_path / "t.jsonl", [talk(0)])).build(replace(context, tokenizer=bare))


def test_pairs_are_neighboring_documents_and_are_not_trained_as_text(
    folder: Path, context: SourceContext, tmp_path: Path
) -> None:
    ask = talk(0)["messages"][:3]
    pairs = [
        {"prompt": ask, "chosen": [{"role": "assistant", "content": a}], "rejected": [{"role": "assistant", "content": b}]}
        for a, b in (("yes", "no"), ("the cat", "a"))
    ]
    component = Conversations(path=written(tmp_path / "pairs.jsonl", pairs), format="preference")
    source: Any = component.build(context)
    assert source.pairs and source.manifest.mask.layout == "pairs"
    said = [
        context.tokenizer.decode([i for i, learned in zip(ids, mask, strict=True) if learned])
        for ids, mask in documents_of(source)
    ]  # type: ignore[union-attr]
    assert said == ["yes", "no", "the cat", "a"]
    for data in (data_of(folder, component), data_of(folder, TokenStore(path=str(source.path)))):
        with pytest.raises(DataError, match="has preference pairs, and training on the next token would also train the rejected"):
            open_stream(data, workspace=tmp_path / "w", seed=1, global_batch=1, micro_batch=1)


def test_held_out_conversations_are_evaluated_on_their_answers(folder: Path, context: SourceContext, tmp_path: Path) -> None:
    component = Conversations(
        path=written(tmp_path / "talks.jsonl", [talk(number) for number in range(40)]), split="held_out", held_out=0.3
    )
    source: Any = component.build(context)
    assert 2 < len(documents_of(source)) < 25
    sets = evaluation(data_of(folder, evaluation={"talks": component}), workspace=tmp_path / "w")
    labels = torch.cat([batch.labels.flatten() for batch in sets["talks"].batches(0, 1, 4)])
    assert int((labels != IGNORE).sum()) == source.manifest.mask.trained and sets["talks"].predicted() is None


def test_a_store_with_a_mask_is_written_and_checked_like_any_other(tmp_path: Path) -> None:
    ids, learned = np.array([1, 2, 3, 0, 4, 5, 0]), np.array([1, 0, 1, 1, 1, 1, 0], dtype=bool)

    def store(name: str, mask: MaskEntry) -> StoreSource:
        with StoreWriter(tmp_path / name, dtype="uint16", mask=mask) as writer:
            writer.add(ids, np.array([4, 7]), learned=learned)
            writer.commit()
        return open_store(tmp_path / name)

    found: Any = store("one", MaskEntry(stops={"0": [0, 0]}))
    assert found.learned(0, 7).tolist() == [False, False, True, True, False, True, False], "nothing predicts a first token"
    assert found.manifest.mask.stops == {"0": [1, 2]} and found.manifest.mask.trained == 3
    assert found.counts().tolist() == [1, 0, 0, 1, 0, 1] and found.verify() == [] and found.manifest.mask.fault() == ""
    other: Any = store("other", MaskEntry(stops={"7": [0, 0]}))
    assert "no document trains a stop token: 7 (0 in the store)" in other.manifest.mask.fault()
    assert found.fingerprint == other.fingerprint
    learned = ~learned
    padded: Any = store("padded", MaskEntry(stops={"1": [0, 0]}, pad=1))
    assert "1 is also the pad token" in padded.manifest.mask.fault() and padded.fingerprint != found.fingerprint
    paired: Any = store("paired", MaskEntry("pairs", stops={"0": [0, 0]}))
    assert paired.pairs and paired.fingerprint != found.fingerprint
    with StoreWriter(tmp_path / "shards", dtype="uint16", mask=MaskEntry(), shard_tokens=4) as writer:
        writer.add(ids, np.array([4, 7]), learned=np.array([1, 0, 1, 1, 1, 1, 0], dtype=bool))
        writer.commit()
    shards: Any = open_store(tmp_path / "shards")
    assert len(shards.manifest.shards) == 2 and shards.learned(1, 7).tolist() == found.learned(1, 7).tolist()
    file = tmp_path / "one" / "shard-00000.learned.bin"
    changed = bytearray(file.read_bytes())
    changed[1] = 1
    file.write_bytes(bytes(changed))
    (fault,) = open_store(tmp_path / "one").verify()
    assert "shard-00000.learned.bin" in fault
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"shard-00000\.learned\.bin is empty"):
        open_store(tmp_path / "one")
    with StoreWriter(tmp_path / "none", dtype="uint16") as writer, pytest.raises(ValueError, match="needs `learned`"):
        writer.add(ids, np.array([4, 7]), learned=learned)
    assert read_manifest(tmp_path / "other").mask == other.manifest.mask


@pytest.mark.parametrize(
    ("keys", "why"),
    [({"messages": "x", "format": "alpaca"}, "alpaca has none"), ({"train": "each", "format": "preference"}, "would separate")],
)
def test_keys_without_effect_are_refused(keys: dict[str, Any], why: str) -> None:
    make: Callable[..., Any] = Conversations
    with pytest.raises(ValueError, match=why):
        make(path="x", **keys)


def command(*arguments: str) -> dict[str, Any]:
    from typer.testing import CliRunner

    from forge_data.commands.cli import app

    result = CliRunner().invoke(app, [*arguments, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)


def test_the_commands_keep_the_mask(folder: Path, context: SourceContext, tmp_path: Path) -> None:
    path = written(tmp_path / "talks.jsonl", [talk(number) for number in range(9)])
    source: Any = Conversations(path=path).build(context)
    tokenizer = ["--tokenizer", str(folder / "tokenizer.json"), "--eos", "<|im_end|>"]
    prepare = ["prepare", "--source", "chat", "--path", path, *tokenizer, "--out", str(tmp_path / "out")]
    found = command(*prepare)
    mask = source.manifest.mask
    assert (found["tokens"], found["documents"], found["trained_tokens"]) == (source.tokens, 9, mask.trained)
    assert (found["turns"], found["ended_turns"]) == (18, 18) and found["fingerprint"] == source.fingerprint
    assert command(*prepare) == found, "a finished store is not written again"
    with pytest.raises(DataError, match=r"a finished store with other settings: .*train was"):
        command(*prepare, "--train", "last")
    assert command("inspect", found["path"])["max_id"] == source.max_id and command("verify", found["path"])["faults"] == []
    command("convert", found["path"], "--out", str(tmp_path / "copy"))
    assert documents_of(open_store(tmp_path / "copy")) == documents_of(source)
    assert read_manifest(tmp_path / "copy").mask == mask
    assert command("diff", found["path"], str(tmp_path / "copy"))["equal"]
    with pytest.raises(DataError, match="has a loss mask, which megatron files cannot hold"):
        command("convert", found["path"], "--to", "megatron", "--out", str(tmp_path / "lost"))
    command(*prepare[:-1], str(tmp_path / "last"), "--train", "last")
    differ = command("diff", found["path"], str(tmp_path / "last"))
    first = next(place for place, learned in enumerate(source.learned(0, source.tokens).tolist()) if learned)
    assert differ["first_mask"] == {"token": first, "trained_in": found["path"]} and not differ["equal"]
    with StoreWriter(tmp_path / "plain", dtype="uint16") as writer:
        writer.add(source.read(0, source.tokens), source.ends().astype(int))
        writer.commit()
    assert command("diff", str(tmp_path / "plain"), found["path"])["first_mask"] == {
        "token": 1,
        "trained_in": str(tmp_path / "plain"),
    }
    words = context.tokenizer.decode(documents_of(source)[4][0])  # type: ignore[union-attr]
    (tmp_path / "asked.jsonl").write_text(json.dumps({"text": words}) + "\n")
    clean = ["decontaminate", found["path"], "--against", str(tmp_path / "asked.jsonl"), "--words", "20"]
    assert command(*clean, "--out", str(tmp_path / "clean"))["overlapping_documents"] == 1
    rest: Any = open_store(tmp_path / "clean")
    assert documents_of(rest) == [each for number, each in enumerate(documents_of(source)) if number != 4] and rest.verify() == []
    for more, why in (
        (["--text", "x"], "source 'chat' has no text; remove --text"),
        (["--tokenizer", "bpe"], "conversations need the tokenizer of their model"),
        (["--format", "preference", "--train", "each"], "would separate the two answers"),
    ):
        with pytest.raises(DataError, match=why):
            command(*prepare, *more)
