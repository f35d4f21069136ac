"""Bytes on disk and elsewhere: files and URLs, mapped shards, document ends, checksums, unfinished output."""
