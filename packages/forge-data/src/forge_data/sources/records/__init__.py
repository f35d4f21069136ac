"""Documents as records: text, or lists of token ids, read file by file and prepared into a store."""
