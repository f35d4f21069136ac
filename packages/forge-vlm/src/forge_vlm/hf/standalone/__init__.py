"""Models that no class of transformers can hold, as folders with the code that they need."""
