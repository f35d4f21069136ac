"""Registry, typed configuration, layout arithmetic and the protocols that Forge's packages share. Imports no torch."""
