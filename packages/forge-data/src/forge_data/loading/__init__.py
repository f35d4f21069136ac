"""The data loader: opens sources, reads rows in their order and makes batches, in worker processes or in this one."""
