"""Stopwatch, environment and progress: what several rooms above need."""
