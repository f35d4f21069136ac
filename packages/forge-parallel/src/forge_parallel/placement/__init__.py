"""Which rank holds what: coordinates, meshes, boxes of tensors, owners, and the collectives between them."""
