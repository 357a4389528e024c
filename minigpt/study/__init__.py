"""What a norm costs after the model has adapted to it: training with swaps on a schedule, and tables of many cells."""
