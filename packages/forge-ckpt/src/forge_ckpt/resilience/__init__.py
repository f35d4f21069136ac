"""What keeps a run alive or ends it well; torch-free, for any training loop."""
