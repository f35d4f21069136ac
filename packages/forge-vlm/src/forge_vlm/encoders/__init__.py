"""Encoders from images to features: a vision transformer, trained from scratch or with the weights of a published model."""
