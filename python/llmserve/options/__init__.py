"""Options: the table of an engine's, and what is made from it."""
