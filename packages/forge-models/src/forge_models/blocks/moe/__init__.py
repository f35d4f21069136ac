"""Mixture of experts: routers, experts, dispatch of tokens to experts, and losses that balance the load."""
