"""Documents of text: the ids that transformers gives them, what stands around included, however they are prepared."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.tokenizers.kinds import KINDS, content, fast
from forge_core.errors import DataError, RecipeWarning
from forge_core.protocols.data import SourceContext
from forge_data.checks import tokenizer_fits
from forge_data.components import Bpe, TextFiles, TokenStore
from forge_data.loading.stream import open_stream
from forge_data.preparation import job
from forge_data.preparation.streaming import StreamedRecords
from forge_data.preparation.tokenization import prepared, tokenize
from forge_data.section import Data
from forge_data.sources.store import MANIFEST, StoreSource, open_store
from forge_data.sources.text import text_files
from forge_data.tokenizers.bpe import BpeTokenizer
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_data.tokenizers.control import identity_of
from forge_data.tokenizers.dump import tokenizer_of

TEXTS = ["The cat sat on the mat.", " user </s> asks\n\nGröße 日本 <|im_start|>", "x"]


@pytest.fixture(scope="module")
def kinds() -> dict[str, tuple[Any, BpeTokenizer]]:
    made = {name: make() for name, make in KINDS.items()}
    return {name: (fast(each), BpeTokenizer(content(each), "</s>")) for name, each in made.items()}


@pytest.fixture
def corpus(tmp_path: Path) -> Any:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    return text_files(str(tmp_path / "*.txt"))


def documents(source: Any) -> list[list[int]]:
    ends = source.ends().tolist()
    return [source.read(start, end).tolist() for start, end in zip([0, *ends], ends, strict=False)]


def wanted(theirs: Any, eos: int) -> list[list[int]]:
    """Control tokens are in no text, but around it."""
    found = []
    for text in TEXTS:
        bare = theirs("a", add_special_tokens=False).input_ids
        whole = theirs("a").input_ids
        at = next(place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
        before, after = whole[:at], whole[at + len(bare) :]
        own = theirs(text, add_special_tokens=False).input_ids if "</s>" not in text else None
        found.append([before, own, [*after, *([] if after[-1:] == [eos] else [eos])]])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_trials_a4_documents_have_the_tokenizers_own_rule_around_them(
    kind: str, kinds: dict[str, Any], corpus: Any, tmp_path: Path
) -> None:
    theirs, ours = kinds[kind]
    made = prepared(corpus, SourceContext(tmp_path / "w", ours, 8, lambda _: None), "text")
    streamed = StreamedRecords(corpus, ours, None)
    for source in (documents(made), [next(iter(streamed.stream(shard))).tolist() for shard in range(3)]):
        for ids, (before, own, after) in zip(source, wanted(theirs, ours.eos or 0), strict=True):
            assert ids[: len(before)] == before and ids[len(ids) - len(after) :] == after
            inside = ids[len(before) : len(ids) - len(after)]
            assert inside == own if own is not None else not {1, 2, 3} & set(inside)


def test_processes_and_stores_keep_the_rule(kinds: dict[str, Any], corpus: Any, tmp_path: Path) -> None:
    _, ours = kinds["llama2"]
    options: Any = {"source": "s", "report": lambda _: None}
    threads = tokenize(corpus, ours, tmp_path / "threads", **options)
    processes = tokenize(corpus, ours, tmp_path / "processes", workers=2, processes=True, **options)
    assert threads.fingerprint == processes.fingerprint and documents(threads)[0][0] == ours.prefix[0]
    carried = tokenizer_of(open_store(tmp_path / "threads"))
    assert carried is not None and carried.prefix == ours.prefix
    off = BpeTokenizer(ours.dump(), "</s>", add_special_tokens=False)
    bare = [tokenize(corpus, off, tmp_path / f"bare{way}", processes=bool(way), workers=2, **options) for way in (0, 1)]
    assert bare[0].fingerprint == bare[1].fingerprint
    assert [ours.prefix[0], *documents(bare[0])[0]] == documents(threads)[0]
    carried = tokenizer_of(open_store(tmp_path / "bare0"))
    assert carried is not None and carried.prefix == ()
    assert "add_special_tokens" not in (tmp_path / "bare0" / MANIFEST).read_text()
    assert json.loads((tmp_path / "threads" / MANIFEST).read_text())["tokenizer"]["add_special_tokens"] is True


def test_another_rule_is_never_served_from_an_older_store(kinds: dict[str, Any], corpus: Any, tmp_path: Path) -> None:
    _, ours = kinds["llama2"]
    off = BpeTokenizer(ours.dump(), "</s>", add_special_tokens=False)
    context = SourceContext(tmp_path / "w", off, 8, lambda _: None)
    assert identity_of(off) == off.fingerprint  # as before there was a rule: such runs find their data again
    old = prepared(corpus, context, "text")
    new = prepared(corpus, replace(context, tokenizer=ours), "text")
    assert Path(old.path) != Path(new.path) and documents(old) != documents(new)
    assert Path(prepared(corpus, context, "text").path) == Path(old.path)
    streams = [StreamedRecords(corpus, each, None).fingerprint for each in (ours, off, ours)]
    assert streams[0] == streams[2] != streams[1]


def test_a_recipe_can_leave_the_rule_out(kinds: dict[str, Any], corpus: Any, tmp_path: Path) -> None:
    _, ours = kinds["llama2"]
    (tmp_path / "tokenizer.json").write_bytes(ours.dump())
    settings = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "add_bos_token": True, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    context = SourceContext(tmp_path / "w", None, 8, lambda _: None)
    on, off = (
        Bpe(path=str(tmp_path / "tokenizer.json"), eos="</s>", add_special_tokens=way).build(context) for way in (True, False)
    )
    assert (on.prefix, off.prefix) == (ours.prefix, ())
    assert on.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    store = TextFiles(path=str(tmp_path / "0.txt")).build(replace(context, tokenizer=on))
    assert isinstance(store, StoreSource) and documents(store)[0][0] == ours.prefix[0]


def test_trials_a3_long_documents_have_the_ids_of_the_whole(kinds: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The cat sat on the mat.\nuser asks:\n\n  Größe 日本\n- x\r\n" * 30
    for name, tokenizer in {**{name: ours for name, (_, ours) in kinds.items()}, "bytes": ByteTokenizer()}.items():
        whole = job.encode([text], tokenizer)
        assert whole.ids.tolist() == [*tokenizer.prefix, *tokenizer.encode(text), *tokenizer.suffix, tokenizer.eos]
        with monkeypatch.context() as patch:
            patch.setattr(job, "LONGEST_PIECE", 40)
            cut = list(job.pieces(text, getattr(tokenizer, "parting", None)))
            assert "".join(cut) == text and (len(cut) > 10) == (name in ("byte_level", "bytes"))
            assert job.encode([text], tokenizer).ids.tolist() == whole.ids.tolist(), name


@pytest.fixture
def ruled(kinds: Any, tmp_path: Path) -> Any:
    """A recipe's tokenizer whose own rule puts a BOS before a text."""
    name = next(name for name, (_, tokenizer) in kinds.items() if tokenizer.prefix)
    (tmp_path / "tokenizer.json").write_bytes(kinds[name][1].dump())
    return Bpe(path=str(tmp_path / "tokenizer.json"), eos="</s>")


def test_check_warns_of_stores_without_what_stands_around_a_text(ruled: Any, corpus: Any, tmp_path: Path) -> None:
    """A store that an older Forge wrote has no key `add_special_tokens`, and no BOS."""
    context = SourceContext(tmp_path, None, 16, lambda _: None)
    for name, tokenizer in (("old", replace(ruled, add_special_tokens=False)), ("new", ruled)):
        tokenize(corpus, tokenizer.build(context), tmp_path / name, source=name, report=lambda _: None, processes=False)
    assert "add_special_tokens" not in json.loads((tmp_path / "old" / MANIFEST).read_text())["tokenizer"]

    def cautions(**more: Any) -> list[Any]:
        run: Any = SimpleNamespace(data=Data(sequence_length=16, **more), model=None)
        return list(tokenizer_fits(run, None))  # type: ignore[arg-type]

    old, new = TokenStore(path=str(tmp_path / "old")), TokenStore(path=str(tmp_path / "new"))
    found = cautions(sources=[new, old], evaluation={"held": old}, tokenizer=ruled)
    assert [one.key for one in found] == ["data.sources.1.path", "data.evaluation.held.path"]
    assert all(isinstance(one, RecipeWarning) for one in found)
    prefix = list(ruled.build(context).prefix)
    assert f"(ids [{prefix[0]}" in str(found[0]) and "add_special_tokens = false" in str(found[0])
    assert cautions(sources=[new], tokenizer=ruled) == []
    assert cautions(sources=[old], tokenizer=replace(ruled, add_special_tokens=False)) == []
    assert cautions(sources=[old]) == []  # the store's own tokenizer says the same
    (tmp_path / "old" / MANIFEST).write_text("{")
    assert cautions(sources=[old], tokenizer=ruled) == []  # opening it says so


def test_a_resume_of_a_run_without_bos_names_the_way_to_go_on(ruled: Any, corpus: Any, tmp_path: Path) -> None:
    source = TextFiles(path=str(tmp_path / "*.txt"))

    def opened(tokenizer: Any, length: int = 4) -> Any:
        data = Data(sequence_length=length, sources=[source], tokenizer=tokenizer)
        return open_stream(data, workspace=tmp_path / "w", seed=0, global_batch=1, micro_batch=1)

    bare = replace(ruled, add_special_tokens=False)
    cursor = opened(bare).start()
    with pytest.raises(
        DataError, match=r"fingerprint was .*older Forge .*data\.tokenizer\.add_special_tokens = false to continue"
    ):
        opened(ruled).from_cursor(cursor)
    next(iter(opened(bare).from_cursor(cursor)))
    with pytest.raises(DataError) as refused:  # not where nothing but another setting differs
        opened(ruled, length=5).from_cursor(opened(ruled).start())
    assert "older Forge" not in str(refused.value)
    with pytest.raises(DataError) as refused:
        opened(bare).from_cursor(opened(ruled).start())
    assert "older Forge" not in str(refused.value)
