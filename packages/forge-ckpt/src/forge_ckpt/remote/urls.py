"""URLs of folders, and the file systems of fsspec that they name. fsspec and its packages are an extra, imported on use."""

from typing import Any

from forge_core.errors import CheckpointError
from forge_core.redaction import redacted_text

EXTRA = "pip install 'forge-ckpt[remote]'"


def is_url(where: object) -> bool:
    """Whether a text names a file system: `s3://bucket/runs`."""
    return "://" in str(where)


def check_url(url: str) -> None:
    """Refuses what is not the URL of a folder in one file system that keeps objects.

    Raises:
        ValueError: says what to give instead.
    """
    scheme, found, rest = url.partition("://")
    if not found or not scheme or not rest.strip("/"):
        raise ValueError(f"{url!r} is not the URL of a folder, such as s3://bucket/runs")
    if "::" in url or any(sign in rest for sign in "*[]#"):
        raise ValueError(f"{redacted_text(url)!r} is a chain or a pattern; give the URL of one folder")
    if "@" in rest or "?" in url:
        raise ValueError(f"{redacted_text(url)!r} has a place for credentials; give them in the environment instead")
    if scheme in ("file", "local"):
        raise ValueError(f"{url!r} is a folder of this machine; the store 'local' flushes what it writes there: take that one")


def open_url(url: str) -> tuple[Any, str]:
    """(file system, path on it). Its listings are of the moment: another rank writes, too.

    Raises:
        CheckpointError: fsspec or its package for this kind of URL is not installed, or there is none.
    """
    try:
        from fsspec.core import url_to_fs

        system, path = url_to_fs(url, use_listings_cache=False)
    except ImportError as cause:
        package = "" if cause.name == "fsspec" else f" ({cause})"
        raise CheckpointError(
            f"{url} needs fsspec and its package for this kind of URL{package}; {EXTRA} has those of s3"
        ) from cause
    except ValueError as cause:  # an unknown protocol
        raise CheckpointError(f"{url} cannot be opened: {cause}") from cause
    return system, str(path).rstrip("/")
