"""Work on stored checkpoints without a run: compared, averaged, a portion at a time."""
