"""What `data prepare` does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext, Tokenizer
from forge_data.components.sources import Stdlib, Text
from forge_data.components.tokenizers import Bpe, Bytes
from forge_data.entropy import unigram_entropy
from forge_data.prepare import tokenise

Report = Callable[[str], None]


def prepare(
    source: str,
    path: str | None,
    out: Path,
    tokenizer: str,
    vocab_size: int,
    split: str | None,
    workers: int | None,
    report: Report,
) -> dict[str, Any]:
    """Writes one store.

    Raises:
        DataError: bad input or a directory that cannot be written.
    """
    component: Any
    if source == "stdlib":
        component = Stdlib(split=split or "all")  # type: ignore[arg-type]
    elif path is None:
        raise DataError("say where the text is: --path FILE, DIRECTORY or PATTERN")
    else:
        component = Text(path=path, split=split or "all")  # type: ignore[arg-type]
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is not empty; choose another place or remove it")
    texts = component.texts()
    made = _tokenizer(tokenizer, vocab_size, SourceContext(out.parent / f".{out.name}.work", None, 1, report, (texts,)))
    store = tokenise(texts, made, out, source=component.texts().what, workers=workers, report=report)
    return {
        "path": str(out),
        "tokens": store.tokens,
        "documents": store.documents,
        "vocab_size": store.vocab_size,
        "unigram_entropy": unigram_entropy([store.counts()]),
        "fingerprint": store.fingerprint,
    }


def _tokenizer(name: str, vocab_size: int, context: SourceContext) -> Tokenizer:
    if name == "bytes":
        return Bytes().build(context)
    if name != "bpe":
        return Bpe(path=name).build(context)
    from forge_data.tokenizers.bpe import trained

    return trained(Bpe(vocab_size=vocab_size), context)
