"""Scaling laws, fitted to finished runs."""
