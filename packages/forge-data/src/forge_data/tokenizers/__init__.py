"""Tokenizers, which implement `forge_core.protocols.data.Tokenizer`: text to token ids and back."""
