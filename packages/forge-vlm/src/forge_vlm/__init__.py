"""Vision-language fusions."""
