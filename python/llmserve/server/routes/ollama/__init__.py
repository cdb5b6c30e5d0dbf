"""Ollama's protocol: /api/..."""
