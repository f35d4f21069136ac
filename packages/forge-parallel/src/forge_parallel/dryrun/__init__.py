"""What a layout costs, found without any of its ranks: real code on tensors that have no memory, in a world that is not there."""
