"""Commands and the hook that look inside a model, also one that is sharded over ranks."""
