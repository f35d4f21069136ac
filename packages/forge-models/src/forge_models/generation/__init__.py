"""Text from a model: cache, sampling, greedy decoding with and without drafts."""
