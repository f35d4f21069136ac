"""Text to token ids and back, behind `forge_core.protocols.data.Tokenizer`."""
