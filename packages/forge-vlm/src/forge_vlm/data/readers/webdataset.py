"""Shards of WebDataset: tar files whose members with one key are one record (`0001.jpg`, `0001.txt`, `0001.json`)."""

import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge_core.errors import DataError
from forge_data.storage.checksums import digest_of
from forge_data.storage.files import find, local_path, read_bytes
from forge_vlm.data.documents import Broken, Record
from forge_vlm.data.readers.files import is_image, natural

TEXTS = ("txt", "caption", "text")
_COMPRESSED = tuple(f".{kind}" for kind in ("tar.gz", "tgz", "tar.bz2", "tbz2", "tar.xz", "txz", "tar.zst", "tzst"))


class TarExamples:
    """The records of some shards: `.json` gives fields, a text file the field of text; images are sorted by name, see `natural`.

    As in WebDataset, a name is cut at its first dot: the part before it, with the directory, is the key of the record, the rest
    is the kind of the member. Members of a record are neighbors. Names that begin with a dot are left out. A reference is shard,
    offset and size, so that an image is read without the tar's table.
    """

    def __init__(self, path: str, text: str, images: str, ignore: Sequence[str] = (), text_records: bool = False) -> None:
        """
        Args:
            path: of the shards.
            text, images: fields into which text files and images are put.
            ignore: kinds of members that are left out.
            text_records: whether a record without an image is text.

        Raises:
            DataError: the file does not exist, or is compressed.
        """
        self.what = path
        self._files = find(path, (".tar", *_COMPRESSED), "tar")
        for file in self._files:
            if file.name.lower().endswith(_COMPRESSED):
                raise DataError(
                    f"{file.where} is compressed, and images are read from the middle of a shard; decompress it (gunzip, unxz), "
                    "or give a pattern such as '*.tar' that leaves it out"
                )
        self._by_name = {file.name: file for file in self._files}
        self._text, self._images = text, images
        self._ignore, self._text_records = frozenset(kind.lower().removeprefix(".") for kind in ignore), text_records

    @property
    def fingerprint(self) -> str:
        """Of the shards, and how they are read."""
        return digest_of(self._files, f"webdataset by number {sorted(self._ignore)} {self._text_records}")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any] | Broken]]:
        """(shard and key, record) of each."""
        for file in self._files:
            try:
                with tarfile.open(local_path(file), "r:") as tar:
                    for key, members in _grouped(tar):
                        place = f"{file.where}, record {key}"
                        try:
                            yield f"{file.name}/{key}", Record(self._record(tar, members, file.name), place)
                        except Broken as broken:
                            yield f"{file.name}/{key}", Broken(f"{place} {broken}")
            except (tarfile.TarError, EOFError) as error:
                raise DataError(f"{file.where} is not an uncompressed tar, or damaged: {error}") from error

    def fetch(self, reference: str) -> bytes:
        """The file of an image."""
        name, _, place = reference.rpartition("#")
        offset, size = map(int, place.split("+"))
        file = self._by_name.get(name)
        if file is None:
            raise DataError(f"shard {name} of {self.what} is missing")
        found = read_bytes(file, offset, offset + size)
        if len(found) != size:
            raise DataError(f"{file.where} is truncated: it ends inside an image at byte {offset}")
        return found

    def _record(self, tar: tarfile.TarFile, members: Sequence[tuple[str, tarfile.TarInfo]], shard: str) -> dict[str, Any]:
        """The fields of one record.

        Raises:
            Broken: a member is of no known kind, or there twice, or cannot be read, or there is no image.
        """
        images: dict[str, str] = {}
        texts: dict[str, str] = {}
        fields: dict[str, Any] = {}
        seen: set[str] = set()
        for kind, member in members:
            if kind in self._ignore:
                continue
            if kind in seen:
                raise Broken(f"has two members {member.name}; give each record a key of its own")
            seen.add(kind)
            regular = member.isreg() and not member.issparse()
            if regular and is_image(f".{kind}"):
                images[kind] = f"{shard}#{member.offset_data}+{member.size}"
            elif regular and kind in TEXTS:
                texts[kind] = _content(tar, member)
            elif regular and kind == "json":
                fields = _fields(tar, member)
            else:
                raise Broken(f"has the member {member.name}, {_fault(kind, member)}")
        if len(set(texts.values())) > 1:
            raise Broken(f"has several texts ({', '.join(texts)}); name the ones to leave out in ignore")
        if not images and (fields.get(self._images) or not self._text_records):
            raise Broken("has no image; set text_records = true where records without images are text")
        if texts:
            fields[self._text] = next(iter(texts.values()))
        return fields | {self._images: [images[kind] for kind in sorted(images, key=natural)]}


def _grouped(tar: tarfile.TarFile) -> Iterator[tuple[str, list[tuple[str, tarfile.TarInfo]]]]:
    """(key, (kind, member) of each member) of neighbors with one key."""
    key, members = "", list[tuple[str, tarfile.TarInfo]]()
    for member in tar:
        folder, _, name = member.name.rpartition("/")
        if member.isdir() or name.startswith("."):
            continue
        begin, _, kind = name.partition(".")
        own = f"{folder}/{begin}" if folder else begin
        if own != key and members:
            yield key, members
            members = []
        key = own
        members.append((kind.lower(), member))
    if members:
        yield key, members


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    content = tar.extractfile(member)
    assert content is not None, "it is a regular file"
    try:
        return content.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise Broken(f"has the member {member.name}, which is not UTF-8: {error.reason} at byte {error.start}") from error


def _fields(tar: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, Any]:
    try:
        found = json.loads(_content(tar, member))
    except (ValueError, RecursionError) as error:
        why = "brackets are nested too deeply" if isinstance(error, RecursionError) else error
        raise Broken(f"has the member {member.name}, which is not valid JSON: {why}") from error
    if not isinstance(found, dict):
        raise Broken(f"has the member {member.name}, which is not a JSON object")
    return found


def _fault(kind: str, member: tarfile.TarInfo) -> str:
    """Why a member of this kind is not read."""
    _, dot, last = kind.rpartition(".")
    if not member.isreg() or member.issparse():
        return "which is a link or another special file; write the tar with --dereference"
    if dot and (last in (*TEXTS, "json")):
        return f"and a name is cut at its first dot, so it is of the kind {kind!r}; use no dots before the suffix"
    known = f"known are images that Pillow reads, {', '.join(TEXTS)} and json"
    return f"and the kind {kind!r} is not known; {known}. Name it in ignore to leave it out"
