"""Text to token ids and back; every tokenizer implements `forge_core.protocols.data.Tokenizer`."""
