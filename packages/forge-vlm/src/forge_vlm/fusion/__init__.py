"""How images enter a decoder: as its blocks, what they read, and what tokens see."""
