"""Conversations: chat templates, which tokens of the assistant are trained, and records of conversations."""
