"""Recordings of brains, predicted from activations and compared with them, in fp64. Voxels and electrodes are columns."""
