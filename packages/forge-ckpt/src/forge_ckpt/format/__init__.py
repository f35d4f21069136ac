"""What a checkpoint is on disk: flat tensor files, one JSON manifest, names, boxes."""
