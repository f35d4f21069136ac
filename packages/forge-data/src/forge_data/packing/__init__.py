"""How documents become rows of one length: cut from the stream, or whole documents by a plan."""
