"""Tests on several processes: `harness.pool` is what a test uses (the `world` fixture), the rest makes it work."""
