"""The demo model that ships inside llmserve: its corpus, tokenizer and training."""
