"""The data loader: opens sources, reads rows in order and builds batches, in worker processes or in the training process."""
