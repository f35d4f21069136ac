"""Context parallelism: ranks split the positions of each row, and exchange keys and values in the attention cores."""
