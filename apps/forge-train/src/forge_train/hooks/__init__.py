"""What happens around a step: logging, progress, evaluation, saving."""
