"""From a description of a model to a sharded one: plan, realize, initial weights."""
