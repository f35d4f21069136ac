"""Stages of training: what is trained and how, as a function of the step."""
