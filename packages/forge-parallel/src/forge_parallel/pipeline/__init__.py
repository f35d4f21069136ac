"""Pipelines: how a model is split into stages, the schedules in which stages run, and the code that runs them."""
