"""The command `ckpt`: what is done to checkpoints by hand, a file for each command."""
