"""The token store, Forge's own format: reader, writer, manifest and checksums."""
