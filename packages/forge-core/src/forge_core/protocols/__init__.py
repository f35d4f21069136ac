"""What two sides must agree on, as `Protocol`s and plain data without torch at run time.

`model` is what models and strategies agree on, `topology` what a rank may ask about its place, `data` what sources and loaders
agree on, `ckpt` what live state and checkpoints do, `convert` what formats of weights do, `job` what all read of a recipe, `run`
what the trainer and its hooks agree on.
"""
