"""The trainer and its engines, evaluation, checkpoints, callbacks and baselines."""
