"""The data loader: opens sources, reads rows in their order, assembles batches, in worker processes or in this one."""
