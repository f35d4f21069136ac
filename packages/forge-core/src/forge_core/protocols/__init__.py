"""What two sides must agree on, as `Protocol`s and plain data without torch at run time.

`model` is what models and strategies agree on, `data` what sources and loaders do, `ckpt` what live state and
checkpoints do, `convert` what formats of weights do, `run` what the trainer and its hooks do.
"""
