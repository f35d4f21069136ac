"""Reading and editing inner values of a running model."""
