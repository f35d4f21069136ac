"""Expert parallelism: tokens are sent to the ranks that hold their experts."""
