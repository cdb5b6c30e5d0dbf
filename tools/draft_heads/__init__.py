"""Trains heads that draft for a model: EAGLE-1, EAGLE-3, Medusa."""
