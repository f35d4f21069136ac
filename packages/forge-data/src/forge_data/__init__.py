"""Token stores, global sample order and loaders."""
