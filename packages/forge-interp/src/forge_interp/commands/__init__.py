"""Commands and the hook for inner values, and capture over ranks. Only this folder imports the trainer."""
