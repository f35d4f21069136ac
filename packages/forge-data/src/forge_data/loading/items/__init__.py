"""Items of documents besides their tokens, such as images: loaded for batches, and asked about."""
