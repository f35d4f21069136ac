"""Bytes on disk and elsewhere: local and remote files, mapped shards, durable writes, fingerprints."""
