"""Mixture of experts: the seam that brings tokens to their experts."""
