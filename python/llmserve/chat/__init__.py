"""Conversations to prompts: a model's chat template, run in a sandbox."""
