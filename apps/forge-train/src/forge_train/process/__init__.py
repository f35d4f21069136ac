"""A process that trains: what signals ask of it, where its words go, how ranks agree to refuse, and how it ends."""
