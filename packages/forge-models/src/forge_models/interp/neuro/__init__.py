"""Recordings of brains, predicted from activations and compared with them, in fp64. Voxels, electrodes and the like are columns."""
