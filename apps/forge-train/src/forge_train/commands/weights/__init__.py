"""Commands on stored weights: evaluate, generate, convert, upcycle."""
