"""How documents become rows of one length: concatenated or best-fit, with positions, documents and labels."""
