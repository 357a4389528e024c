"""Somebody else's class as a norm of a GPT-2: find it, construct it, adapt it, watch it."""
