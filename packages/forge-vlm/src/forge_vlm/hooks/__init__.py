"""What a run measures of a vision-language model."""
