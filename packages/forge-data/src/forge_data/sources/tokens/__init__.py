"""Token ids in the formats of other frameworks, read where they are."""
