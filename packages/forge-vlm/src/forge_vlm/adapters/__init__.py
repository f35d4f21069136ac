"""Features of an encoder to the width of a decoder, and to fewer tokens."""
