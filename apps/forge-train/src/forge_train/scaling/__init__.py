"""Scaling laws: loss against parameters, tokens and compute, fitted to finished runs, with intervals and what they predict."""
