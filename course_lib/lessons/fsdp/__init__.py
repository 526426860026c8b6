"""Lesson 06: fully sharded training, its overlap and its checkpoints."""
