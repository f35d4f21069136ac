"""Components of this distribution. Importing them does not import torch."""
