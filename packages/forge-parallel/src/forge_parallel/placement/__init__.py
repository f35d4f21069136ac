"""Where tensors live: coordinates of ranks, meshes, boxes of tensors and their owners, and collectives."""
