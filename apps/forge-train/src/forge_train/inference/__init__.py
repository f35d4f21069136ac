"""Stored weights in use: opened from a run, a checkpoint or a Hugging Face folder, continued or evaluated."""
