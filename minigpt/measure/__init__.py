"""Stopwatch, environment, settings and progress, for the packages above."""
