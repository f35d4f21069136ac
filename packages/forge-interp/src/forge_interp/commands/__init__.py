"""Commands and the hook that look inside a model, and capture over ranks. Only this folder imports the trainer."""
