"""Is a layout right? Parity with one process, equal replicas, finite state, and what is proven."""
