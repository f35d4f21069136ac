"""Recipes: their keys, and how a recipe is read and checked. Does not import torch."""
