"""The parts of gpu_suite.py. Each yields the name of every piece of its work before it begins with it."""
