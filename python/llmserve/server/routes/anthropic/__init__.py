"""Anthropic's protocol: POST /v1/messages."""
