"""The format of checkpoints on disk: flat tensor files, one JSON manifest, names, boxes."""
