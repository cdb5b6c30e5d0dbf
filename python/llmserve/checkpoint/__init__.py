"""Which files make a model, where they come from, and what they say of generation."""
