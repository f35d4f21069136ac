"""Readers of token files and of records, one module per format; some modules also write their format."""
