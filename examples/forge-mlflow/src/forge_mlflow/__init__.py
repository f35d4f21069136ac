"""A tracker of Forge that writes to MLflow."""
