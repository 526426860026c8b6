"""Trainers, evaluation, checkpoints and baselines."""
