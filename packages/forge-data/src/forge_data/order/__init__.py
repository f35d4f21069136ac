"""The order of samples: permutations, mixtures, phases and cursors. Pure integer arithmetic; nothing is read here."""
