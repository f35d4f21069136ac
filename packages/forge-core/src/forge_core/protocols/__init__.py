"""The interfaces between packages, as `Protocol`s and plain data. Nothing here imports torch at run time.

`model` has the interfaces of models, strategies and optimizers; `topology` the position of a rank in the layout; `data` sources,
tokenizers and streams; `checkpoint` live state and stores; `weights` formats of weights; `job` the keys of a recipe that several
packages read; `run` the trainer and its hooks.
"""
