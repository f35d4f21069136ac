"""The text of records with images, such as a tokenizer is trained on."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

from forge_core.errors import DataError
from forge_data.sources.records import in_split
from forge_vlm.data.chat import Chat
from forge_vlm.data.documents import Broken, Examples, Fields, Words, parts_of


@dataclass(frozen=True)
class TextOf:
    """Documents without their images, as `Texts`; broken ones are left out, and told when the source is prepared."""

    examples: Examples
    fields: Fields
    chat: Chat
    split: str
    held_out: float

    @property
    def fingerprint(self) -> str:
        """Of the records and of how they are read."""
        made = f"{self.fields} {self.chat.identity} {self.split} {self.held_out}"
        return sha256(f"{self.examples.fingerprint} {made}".encode()).hexdigest()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """(name, text) of every document."""
        for name, record in self.examples:
            if in_split(name, self.split, self.held_out):
                with suppress(Broken, DataError):
                    parts = parts_of(record, self.fields, self.chat)
                    yield name, "".join(part.text for part in parts if isinstance(part, Words))
