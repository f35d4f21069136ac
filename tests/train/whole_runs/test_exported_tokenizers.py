"""A run and its export give the same ids: transformers alone opens the export. Also what a run keeps of its first weights."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from forge_ckpt.checkpoint.locate import locate
from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_data.tokenizers.dump import restore
from forge_models.generation import GREEDY
from forge_train.formats.forge import with_rules_of_then
from forge_train.inference.continuation import Continuation
from forge_train.inference.stored import load_model, open_weights
from forge_train.inference.tokenizer import chat_for, tokenizer_for
from forge_train.run.weights import tokenizer_difference
from models.hf.command_line import run
from train.runs import train

TEXT = [
    "The cat sat on the mat and the dog ran to the park.",
    "She went to the park.",
    "def read(self):\n    return self.value\n",
]
SPECIALS = ["<unk>", "<s>", "</s>", "<|end|>"]
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
RECIPE = """
[model]
name = "decoder"
from_hf = "{folder}/hf"

[data]
sequence_length = 16

[data.tokenizer]
name = "bpe"
path = "{folder}/hf/tokenizer.json"
eos = "</s>"

[[data.sources]]
name = "jsonl"
path = "{folder}/data.jsonl"

[train]
max_steps = 2
threads = 1
global_batch = 4
micro_batch = 4

[precision]
compute = "fp32"

[optimizer]
name = "adamw"
lr = 1e-2

[schedule]
name = "constant"

[[hooks]]
name = "save"
"""


def metaspace(bos: bool = True) -> Tokenizer:
    """As Llama 2: the decoder takes the first space away, and each text begins with `<s>`."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # type: ignore[assignment]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])  # type: ignore[assignment]
    backend.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=96, special_tokens=SPECIALS, show_progress=False))
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def folder_of(place: Path, backend: Tokenizer) -> Path:
    import transformers

    torch.manual_seed(5)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=3,
        pad_token_id=None,
        **sizes,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    backend.save(str(place / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
    }
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6}))
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from a folder of transformers, and its export."""
    folder = tmp_path_factory.mktemp("exported")
    folder_of(folder / "hf", metaspace())
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT * 30))
    (folder / "r.toml").write_text(RECIPE.format(folder=folder))
    train(folder / "r.toml", [f"--job.dir={folder / 'run'}"])
    assert run("convert", "--to", "hf", folder / "run", folder / "out") == 0
    return folder


def continued(where: Path, prompt: str) -> tuple[str, list[int]]:
    """Greedy text and ids of our own."""
    weights, ids = open_weights(where, Registry()), list[int]()
    coder = tokenizer_for(weights, None, Registry(), lambda _: None)
    model: Any = load_model(weights)
    continuation = Continuation(model, coder, GREEDY, max_tokens=9)
    found = continuation._new

    def noted(prompt: list[int]) -> Any:
        for token in found(prompt):
            ids.append(token)
            yield token

    continuation._new = noted  # type: ignore[method-assign]
    return "".join(continuation(prompt)), ids


def test_trials_a4_a_run_and_its_export_generate_the_same_ids(place: Path) -> None:
    """The export by transformers alone. Without the first token, or with two of them, the continuation is another one."""
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(place / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "out", dtype=torch.float32)

    def generated(ids: list[int]) -> list[int]:
        given = torch.tensor([ids])
        found = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=9, eos_token_id=None, pad_token_id=0
        )
        return found[0, len(ids) :].tolist()

    prompt = "She went to the"
    ids = theirs(prompt).input_ids
    assert ids[0] == 1 and ids.count(1) == 1
    expected = generated(ids)
    assert generated(ids[1:]) != expected and generated([1, *ids]) != expected
    for where in ("run", "out"):
        text, new = continued(place / where, prompt)
        assert new == expected
        whole, before = theirs.decode([*ids, *expected], skip_special_tokens=True), theirs.decode(ids, skip_special_tokens=True)
        assert before == prompt and text == whole[len(before) :]  # trials A6: the space of the first word included


def test_trials_a5_ends_template_and_settings_of_generation_come_back(place: Path, tmp_path: Path) -> None:
    import transformers

    assert run("convert", "--to", "forge", place / "run", tmp_path / "forge") == 0
    assert run("convert", "--to", "hf", tmp_path / "forge", tmp_path / "back") == 0
    source = json.loads((place / "hf" / "generation_config.json").read_text())
    for folder in (place / "out", tmp_path / "back"):
        assert json.loads((folder / "generation_config.json").read_text()) == source
        config = json.loads((folder / "config.json").read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == (1, 3)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert theirs.chat_template == TEMPLATE and (theirs.bos_token, theirs.eos_token) == ("<s>", "<|end|>")
    assert open_weights(place / "run", Registry()).facts.ends == (2, 3)


def test_trials_a5_a_resumed_run_keeps_what_it_started_with(place: Path, tmp_path: Path) -> None:
    """Also where the folder is gone by then: it is in the checkpoint."""
    shutil.copytree(place / "run", tmp_path / "run")
    before = dict(locate(place / "run").manifest().meta)
    (place / "hf" / "generation_config.json").rename(place / "hf" / "gone.json")
    try:
        train(place / "r.toml", [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=3", "--checkpoint.allow=train.max_steps"])
    finally:
        (place / "hf" / "gone.json").rename(place / "hf" / "generation_config.json")
    after = locate(tmp_path / "run").manifest()
    assert after.step == 3
    for key in ("ends", "special_tokens", "generation", "chat_template", "family", "tokenizer"):
        assert after.meta[key] == before[key]


def test_trials_a8_weights_of_another_tokenizer_are_refused(place: Path, tmp_path: Path) -> None:
    """As many ids, of other texts; by the folder and by the checkpoint of a run. Another file of one tokenizer is accepted."""
    other = json.loads(metaspace().to_str())
    words = other["model"]["vocab"]
    words["t"], words["p"] = words["p"], words["t"]
    (tmp_path / "other.json").write_text(json.dumps(other))
    (tmp_path / "same.json").write_text(json.dumps(json.loads(metaspace().to_str()), indent=7))
    settings = [f"--job.dir={tmp_path / 'run'}", f"--data.tokenizer.path={tmp_path / 'other.json'}"]
    with pytest.raises(
        ForgeError, match=r"model\.from_hf: .*another tokenizer.*id \d+ is 'p' there and 't' here|id \d+ is 't' there"
    ):
        train(place / "r.toml", settings)
    warm = ["--model.from_hf=none", f"--start.weights={place / 'run'}"]
    shape = [
        "dim=32",
        "ffn_dim=48",
        "layers=2",
        "heads=4",
        "kv_heads=2",
        f"vocab_size={metaspace().get_vocab_size()}",
        "max_length=64",
    ]
    warm += [f"--model.{key}" for key in shape]
    with pytest.raises(ForgeError, match=r"start\.weights: .*another tokenizer.*fingerprint"):
        train(place / "r.toml", [*settings, *warm])
    same = [f"--job.dir={tmp_path / 'fine'}", f"--data.tokenizer.path={tmp_path / 'same.json'}"]
    assert train(place / "r.toml", same)["step"] == 2


def test_trials_a1_a_prompt_is_a_turn_of_the_template(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the export and the run: the ids are those of transformers, and the answer is what it generates."""
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(place / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "out", dtype=torch.float32)
    given = theirs.apply_chat_template([{"role": "user", "content": "the cat"}], add_generation_prompt=True, return_tensors="pt")
    ids = given["input_ids"] if hasattr(given, "keys") else given
    assert ids[0].tolist().count(3) == 1 and ids[0].tolist().count(1) == 1  # each control token is one id
    options = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": [2, 3], "pad_token_id": 0}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    whole, before = (theirs.decode(row, skip_special_tokens=True) for row in (found[0], ids[0]))
    for where in ("run", "out"):
        capsys.readouterr()
        given = ("--prompt", "the cat", "--chat", "--temperature", "0", "--max-tokens", "9", "--json")
        assert run("generate", place / where, *given) == 0
        assert json.loads(capsys.readouterr().out)["text"] == whole[len(before) :]
    weights = open_weights(place / "run", Registry())
    coder = tokenizer_for(weights, None, Registry(), lambda _: None)
    chat = Continuation(load_model(weights), coder, GREEDY, max_tokens=1, chat=chat_for(weights, coder))
    assert chat._prompt("the cat") == ids[0].tolist()
    assert chat._prompt("<|end|>").count(3) == 1  # what a user says spells no control token
    assert run("generate", place / "run", "--prompt", "x", "--image", "a.png") == 2 and "--image" in capsys.readouterr().err


def test_trials_a8_tokenizers_are_compared_by_their_ids() -> None:
    one = restore(metaspace().to_str().encode(), 2, "one")
    assert tokenizer_difference(one, restore(metaspace(bos=False).to_str(pretty=True).encode(), 2, "two")) == ""
    changed = json.loads(metaspace().to_str())
    changed["model"]["merges"] = changed["model"]["merges"][1:]
    assert "the same text has other ids" in tokenizer_difference(one, restore(json.dumps(changed).encode(), 2, "three"))


def test_trials_a4_runs_from_before_the_rule_generate_without_a_first_token(place: Path) -> None:
    meta = json.loads(json.dumps(dict(locate(place / "run").manifest().meta)))
    assert with_rules_of_then(meta) == meta
    del meta["config"]["data"]["tokenizer"]["add_special_tokens"]
    assert with_rules_of_then(meta)["config"]["data"]["tokenizer"]["add_special_tokens"] is False
    for other in (
        {},
        {"config": {}},
        {"config": {"data": {"tokenizer": "none"}}},
        {"config": {"data": {"tokenizer": {"name": "bytes"}}}},
    ):
        assert with_rules_of_then(other) == other


def exported(tokenizer: str, folder: Path) -> Any:
    """The tokenizer of a run's export, opened by transformers, and the run's own."""
    import transformers

    from train.runs import TINY

    recipe = TINY.replace("vocab_size = 61", "vocab_size = 300").replace(
        'name = "random"', f'name = "jsonl"\npath = "{folder}/data.jsonl"'
    )
    recipe = recipe.replace("vocab_size = 300\ntokens = 4000\ndocument = 23\n", "")
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT * 30))
    (folder / "r.toml").write_text(recipe + f"\n[data.tokenizer]\n{tokenizer}")
    train(folder / "r.toml", [f"--job.dir={folder / 'run'}", "--train.max_steps=3"])
    assert run("convert", "--to", "hf", folder / "run", folder / "out") == 0
    ours = tokenizer_for(open_weights(folder / "run", Registry()), None, Registry(), lambda _: None)
    return transformers.AutoTokenizer.from_pretrained(folder / "out"), ours


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_trials_h_every_tokenizer_is_exported_as_one_of_transformers(kind: str, tmp_path: Path) -> None:
    tokenizer = 'name = "bytes"\n'
    if kind == "sentencepiece":
        import sentencepiece

        model = io.BytesIO()
        options = {"vocab_size": 120, "model_type": "bpe", "byte_fallback": False, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT * 5), model_writer=model, **options)
        (tmp_path / "small.model").write_bytes(model.getvalue())
        (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
        tokenizer = f'name = "sentencepiece"\npath = "{tmp_path}/small.model"\n'
    theirs, ours = exported(tokenizer, tmp_path)
    texts = ["She went to the park.", "the cat sat"] + (["größe 🙂\n<|endoftext|>"] if kind == "bytes" else [])
    for text in texts:
        given = ours.encode(text).tolist()
        found = theirs(text).input_ids
        if "<|endoftext|>" not in text:
            assert found == [*ours.prefix, *given]
        assert theirs.decode(given, skip_special_tokens=True) == ours.decode(given)
    assert theirs.eos_token_id == ours.eos
    assert bool(ours.prefix) == (kind == "sentencepiece")
