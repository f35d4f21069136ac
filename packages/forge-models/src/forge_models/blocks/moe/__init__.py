"""Mixture of experts: routers, experts, the seam that brings tokens to them, and what keeps them balanced."""
