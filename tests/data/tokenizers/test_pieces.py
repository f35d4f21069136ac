"""Pieces of one text: the ids of transformers for the whole, control tokens of trusted pieces only, and places from offsets."""

import random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors

from data.tokenizers.kinds import CONTROLS, KINDS, byte_level, content, fast, with_bos
from forge_core.errors import DataError
from forge_data.tokenizers.bpe import BpeTokenizer, _are_apart
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_data.tokenizers.control import adapted, identity_of

WORDS = [
    "The cat",
    " sat",
    "on the mat.",
    "\n",
    " ",
    "  ",
    "Größe 日本",
    "user",
    "\n\nassistant",
    "é",
    "STOPPED",
    "<think>",
    "<",
    "|>",
]
EXTRA = {"flagged": ("<|left|>", "<|right|>", "STOP", "<|norm|>")}


@pytest.fixture(scope="module")
def kinds() -> dict[str, tuple[Any, Any]]:
    """By name: the tokenizer of transformers, and ours."""
    made = {name: make() for name, make in KINDS.items()}
    return {name: (fast(each), BpeTokenizer(content(each), "</s>")) for name, each in made.items()}


def drawn(kind: str, seed: int) -> list[tuple[str, bool]]:
    """Pieces of which only trusted ones spell control tokens."""
    rng = random.Random(seed)
    controls = CONTROLS + EXTRA.get(kind, ())
    pieces = []
    for _ in range(rng.randrange(9)):
        trusted = rng.random() < 0.5
        words = [*WORDS, *controls] if trusted else WORDS
        pieces.append(("".join(rng.choices(words, k=rng.randrange(4))), trusted))
    return pieces


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_ids_that_transformers_gives_the_whole_text(kind: str, kinds: dict[str, tuple[Any, Any]]) -> None:
    theirs, ours = kinds[kind]
    tried = 0
    for seed in range(150):
        pieces = drawn(kind, seed)
        text = "".join(each for each, _ in pieces)
        wanted = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        untrusted = [spelled for spelled in _spelled(wanted, text, theirs) if not _inside(spelled, pieces)]
        if untrusted:
            continue  # pieces that join into a control token
        tried += 1
        ids, places = ours.encode_pieces(pieces)
        assert ids.tolist() == wanted.input_ids, pieces
        assert len(places) == len(ids)
    assert tried > 100


def _spelled(encoding: Any, text: str, theirs: Any) -> list[tuple[int, int]]:
    special = set(theirs.all_special_ids) | set(theirs.added_tokens_decoder)
    found = []
    for index, (start, stop) in zip(encoding.input_ids, encoding.offset_mapping, strict=True):
        token = theirs.convert_ids_to_tokens(index)
        if index in special and theirs.added_tokens_decoder[index].special and (at := text.find(token, start, stop)) >= 0:
            found.append((at, at + len(token)))
    return found


def _inside(span: tuple[int, int], pieces: list[tuple[str, bool]]) -> bool:
    trusted = [flag for text, flag in pieces for _ in text]
    return all(trusted[span[0] : span[1]])


@pytest.mark.parametrize("kind", KINDS)
def test_no_control_token_that_untrusted_text_spells_becomes_one(kind: str, kinds: dict[str, tuple[Any, Any]]) -> None:
    theirs, ours = kinds[kind]
    controls = (*CONTROLS, *EXTRA.get(kind, ()))
    ids_of = {spelling: theirs.convert_tokens_to_ids(spelling) for spelling in controls}
    special = {index for spelling, index in ids_of.items() if spelling != "<unk>"}
    for spelling in controls:
        for words in (f"say {spelling} now", spelling, f"{spelling}{spelling}", f" {spelling} <|im_start|></s>"):
            assert special.isdisjoint(ours.encode(words).tolist()), (spelling, words)
            pieces = [("<|im_start|>", True), ("user\n", True), (words, False), ("<|im_end|>\n", True)]
            ids, places = ours.encode_pieces(pieces)
            found = [index for index in ids.tolist() if index in special]
            assert found == [ids_of["<|im_start|>"], ids_of["<|im_end|>"]], (spelling, words)
            assert places[np.isin(ids, found)].tolist() == [[0, 0], [3, 3]]
            if kind in ("byte_level", "split_bytes"):
                assert theirs.decode(ids, skip_special_tokens=False) == "".join(text for text, _ in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_a_control_token_of_which_a_part_is_untrusted_is_text(kind: str, kinds: dict[str, tuple[Any, Any]]) -> None:
    theirs, ours = kinds[kind]
    whole = theirs("a<|im_end|>b", add_special_tokens=False).input_ids
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    assert end in whole
    for pieces in (
        [("a<|im_", True), ("end|>b", False)],
        [("a<|im_", False), ("end|>b", True)],
        [("a<", True), ("|im_end|>b", False)],
    ):
        assert end not in ours.encode_pieces(pieces)[0], pieces
    assert ours.encode_pieces([("a<|im_", True), ("end|>b", True)])[0].tolist() == whole
    assert ours.encode_pieces([("a<|im_", True), ("", False), ("end|>b", True)])[0].tolist() == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_is_a_control_token_without_an_id(kind: str, kinds: dict[str, tuple[Any, Any]]) -> None:
    theirs, ours = kinds[kind]
    image = theirs.convert_tokens_to_ids("<image>")
    for before, after in (("The cat", " sat on"), ("", "the mat"), ("user ", ""), ("a</s>", "\nb")):
        for trusted in (True, False):
            if "</s>" in before and not trusted:
                continue
            whole = theirs(f"{before}<image>{after}", add_special_tokens=False).input_ids
            ids, places = ours.encode_pieces([(before, trusted), (after, trusted)], cuts=[1])
            assert ids.tolist() == [index for index in whole if index != image], (before, after)
            assert (places[:, 0] == places[:, 1]).all() and (places == 0).sum() == 2 * whole.index(image), places


def test_places_are_those_of_the_offsets(kinds: dict[str, tuple[Any, Any]]) -> None:
    for kind, (theirs, ours) in kinds.items():
        pieces = [("Größe 日", False), ("本 and ", True), ("", False), ("<s>", True), ("user asks", False), ("\n", True)]
        encoding = theirs("".join(text for text, _ in pieces), add_special_tokens=False, return_offsets_mapping=True)
        of_character = [number for number, (text, _) in enumerate(pieces) for _ in text]
        ids, places = ours.encode_pieces(pieces)
        assert ids.tolist() == encoding.input_ids
        wanted = [[of_character[start], of_character[max(start, stop - 1)]] for start, stop in encoding.offset_mapping]
        assert places.tolist() == wanted, kind


def test_a_text_may_have_the_characters_that_mark_places(kinds: dict[str, tuple[Any, Any]]) -> None:
    theirs, ours = kinds["byte_level"]
    odd = "\U0010fffd3\U0010fffd \U0010fffc0\U0010fffc</s>"
    ids, _ = ours.encode_pieces([("<s>", True), (odd, False), ("x", True)], cuts=[2])
    assert theirs.decode(ids, skip_special_tokens=False) == f"<s>{odd}x"
    assert theirs.convert_tokens_to_ids("</s>") not in ids
    for _, each in kinds.values():
        assert not set(each.encode(odd).tolist()) & {1, 2, 3, 4}


def test_the_rule_of_a_tokenizer_is_what_its_library_adds() -> None:
    for name, make in KINDS.items():
        tokenizer = make()
        bare = tokenizer.encode("The cat", add_special_tokens=False).ids
        whole = tokenizer.encode("The cat", add_special_tokens=True).ids
        other, own = BpeTokenizer(content(tokenizer), "<|im_end|>"), BpeTokenizer(content(tokenizer), "</s>")
        assert [*other.prefix, *bare, *other.suffix] == whole, name
        assert own.prefix == other.prefix and own.suffix == ()
        off = BpeTokenizer(content(tokenizer), "</s>", add_special_tokens=False)
        assert (off.prefix, off.suffix, off.fingerprint) == ((), (), own.fingerprint)
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(each) for each in ("<s>", "</s>")]
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", ids[1]), ("<s>", ids[0]))  # type: ignore[assignment]
    roberta = BpeTokenizer(content(tokenizer), "<|im_end|>")
    assert (roberta.prefix, roberta.suffix) == ((ids[0],), (ids[1],))
    words = Tokenizer(models.WordLevel({"cat": 0, "</s>": 1}))
    words.add_special_tokens(["</s>"])
    assert BpeTokenizer(content(with_bos(words, "$A </s>")), "</s>").prefix == ()


def test_bytes_know_no_control_tokens() -> None:
    ids, places = ByteTokenizer().encode_pieces([("aé", True), ("", True), ("日</s>", False)], cuts=[2])
    assert bytes(ids.tolist()).decode() == "aé日</s>"
    assert places.tolist() == [[0, 0]] * 3 + [[2, 2]] * 7
    assert [len(each) for each in ByteTokenizer().encode_pieces([])] == [0, 0]


def test_a_tokenizer_of_an_older_plugin_encodes_text_and_refuses_conversations() -> None:
    class Older:
        name, vocab_size, eos, fingerprint = "older", 257, 256, "f"

        def encode(self, text: str) -> np.ndarray:
            return ByteTokenizer().encode(text)

    tokenizer = adapted(Older())
    assert (tokenizer.prefix, tokenizer.suffix, tokenizer.eos, tokenizer.fingerprint) == ((), (), 256, "f")
    ids, places = tokenizer.encode_pieces([("ab", False)])
    assert ids.tolist() == [97, 98] and places.tolist() == [[0, 0], [0, 0]]
    with pytest.raises(DataError, match=r"tokenizer 'older' has no encode_pieces, which conversations"):
        tokenizer.encode_pieces([("<s>", True), ("a", False)])
    own = ByteTokenizer()
    assert adapted(own) is own


def test_a_token_of_its_own_is_none_in_a_longer_word(kinds: dict[str, tuple[Any, Any]]) -> None:
    theirs, ours = kinds["flagged"]
    stop = theirs.convert_tokens_to_ids("STOP")
    ordinary = ours.encode("STOPped </s>").tolist()
    assert ours.encode_pieces([("STOP", True), ("ped </s>", False)])[0].tolist() == ordinary
    ids = ours.encode_pieces([("STOP", True), ("ped </s>", False), (" STOP<s>", True)])[0].tolist()
    assert ids[: len(ordinary)] == ordinary and ids.count(stop) == 1


def test_tokenizers_that_made_control_tokens_of_text_have_data_of_another_name(kinds: dict[str, tuple[Any, Any]]) -> None:
    names = {kind: identity_of(ours) == ours.fingerprint for kind, (_, ours) in kinds.items()}
    assert names.pop("byte_level") and not any(names.values())  # the others have a rule, or are of that kind
    assert identity_of(kinds["unigram"][1]).endswith(" 2") and identity_of(ByteTokenizer()) == ByteTokenizer().fingerprint


def test_texts_that_images_part_are_encoded_fast_and_equally(
    kinds: dict[str, tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = kinds["byte_level"]
    image = theirs.convert_tokens_to_ids("<image>")
    texts = ["The cat </s>", " sat\nöö ", "", "on"]
    whole = [theirs(text, add_special_tokens=False).input_ids for text in ("The cat ", " sat\nöö <image><image>on")]
    monkeypatch.setattr(ours, "_controlled", None)  # what takes longer
    ids, places = ours.encode_pieces([(text, False) for text in texts], cuts=[1, 2, 3])
    assert ids[: len(whole[0])].tolist() == whole[0]
    assert ids[len(ours.encode(texts[0])) :].tolist() == [index for index in whole[1] if index != image]
    lengths = [len(ours.encode(text)) for text in texts]
    assert places.tolist() == [[number, number] for number, length in enumerate(lengths) for _ in range(length)]
    assert [len(each) for each in ours.encode_pieces([])] == [0, 0]
    assert not _are_apart([("a", False), ("b", False)], []) and not _are_apart([("a", True)], [])
    assert _are_apart([("a", False), ("", False), ("b", False)], [1]) and not _are_apart(
        [("", True), ("a", False), ("b", False)], [1]
    )
