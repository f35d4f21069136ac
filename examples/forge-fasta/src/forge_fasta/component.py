"""The keys of the source and of the tokenizer."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Le

from forge_core import Component
from forge_core.protocols import Source, SourceComponent, SourceContext, Texts

if TYPE_CHECKING:
    from forge_fasta.kmer import KmerTokenizer


@dataclass(frozen=True, kw_only=True)
class Fasta(SourceComponent):
    """Records of FASTA files, one document each: the letters of DNA, RNA or a protein without line breaks and headers."""

    path: str
    """A file, or a folder with files `*.fa` and `*.fasta`, which are read in the order of their names."""

    def texts(self) -> Texts:
        from forge_fasta.reader import FastaTexts

        return FastaTexts(Path(self.path))

    def build(self, context: SourceContext) -> Source:
        from forge_data import prepared

        return prepared(self.texts(), context, "fasta")  # tokenized once, into the workspace of the run

    @classmethod
    def examples(cls, folder: Path) -> "Iterable[Fasta]":
        """Returns a source of forty records."""
        records = [f">record {number}\n{'ACGT' * number}\n{'TTGACA' * 3}\n" for number in range(1, 41)]
        (folder / "small.fa").write_text("".join(records))
        return (cls(path=str(folder)),)


@dataclass(frozen=True, kw_only=True)
class KmerConfig(Component):
    """Runs of the letters A, C, G and T in pieces of k letters, one token each; every other byte is a token of its own.

    No text is lost: lowercase letters, N and the rest of a run are bytes.
    """

    k: Annotated[int, Gt(0), Le(8)] = 4
    """Letters of a token. The vocabulary has 4^k pieces, 256 bytes and the end of document."""

    def build(self, context: SourceContext) -> "KmerTokenizer":
        from forge_fasta.kmer import KmerTokenizer

        return KmerTokenizer(self.k)
