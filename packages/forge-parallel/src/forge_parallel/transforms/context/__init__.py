"""Context parallelism: ranks split the positions of a row and meet in the attention cores."""
