"""A file of a corpus as plain data: what was known of it when it was listed. Nothing here opens it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """One file.

    Attributes:
        name: its path relative to the fixed part of what the user gave; files are sorted by it.
        where: path or URL.
        size: in bytes, when it was listed.
        stamp: changes when the file does, as far as its file system can tell: modification time or ETag.
        tagged: the stamp follows from the content, as an ETag does and a time does not.
    """

    name: str
    where: str
    size: int
    stamp: str
    tagged: bool = False

    @property
    def remote(self) -> bool:
        """Whether a URL names the file."""
        return is_url(self.where)


def is_url(path: str) -> bool:
    """Whether a path names a file system: `s3://bucket/file`, `file:///data`."""
    return "://" in path
