"""Text to token ids and back, whatever kind of file a tokenizer is in."""
