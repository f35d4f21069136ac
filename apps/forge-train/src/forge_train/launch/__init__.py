"""Jobs of `forge-train launch`: cluster files, scripts for SLURM, manifests for Kubernetes. Does not import torch."""
