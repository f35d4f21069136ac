"""What a recipe would cost, computed in a dry run and drawn in the terminal."""
