"""Lesson 16: gradients beside those of one process."""
