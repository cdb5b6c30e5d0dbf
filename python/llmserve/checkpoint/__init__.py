"""Which files make a model, and where they come from."""
