"""The assembled trainer."""
