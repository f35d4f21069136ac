"""Many runs of one recipe: a grid, random settings, or successive halving; here, some at a time, or as a job array."""
