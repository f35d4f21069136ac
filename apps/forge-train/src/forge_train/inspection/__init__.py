"""What the commands that look inside of models share: their inputs, and pictures of similarities."""
