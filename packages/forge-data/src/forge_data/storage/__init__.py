"""Access to corpora and to the workspace: files and URLs, mapped shards, document ends, checksums, unfinished output."""
