"""From text to a token store: parts of a corpus tokenized by a pool of processes."""
