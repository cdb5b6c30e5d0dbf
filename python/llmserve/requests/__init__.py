"""From the arguments of a call to its outputs: admission, the way through the engine, and back."""
