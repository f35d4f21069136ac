"""Campaigns: many short runs that measure layouts, models and precisions."""
