"""Methods of interpretability as functions of a decoder and tokens, made of `capture` and `edit`."""
