"""The cost of a norm after the model has adapted to it: training with swaps on a schedule, and tables of many cells."""
