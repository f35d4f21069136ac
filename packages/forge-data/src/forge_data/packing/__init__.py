"""Packs documents into rows of one length: by cutting the stream, or by a plan of whole documents."""
