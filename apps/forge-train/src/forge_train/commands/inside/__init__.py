"""Commands that look inside of models: what they compute between tokens and logits, and how alike that is."""
