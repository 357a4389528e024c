"""Asks questions about a model."""
