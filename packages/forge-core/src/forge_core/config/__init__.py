"""The configuration engine: three layers, one typed tree, every fault at once.

`layers` reads and merges, `validate` types and builds, `explain` and `schema` describe, `checks` runs the rules across
sections. Nothing here knows a particular section: the schema is a dataclass that the caller passes.
"""
