"""Parsers of what a chat model writes: calls of tools, and reasoning."""
