"""What two sides must agree on, as `Protocol`s and plain data; nothing here imports torch at run time.

`model` holds what models and strategies agree on, `topology` what a rank may ask about its place, `data` what sources and loaders
agree on, `checkpoint` live state and its checkpoints, `weights` formats of weights, `job` what every package reads of a recipe,
and `run` what the trainer and its hooks agree on.
"""
