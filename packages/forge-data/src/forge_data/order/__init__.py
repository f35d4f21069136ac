"""Which sample comes when: permutations, mixtures, phases and cursors. Integers only; no bytes are read here."""
