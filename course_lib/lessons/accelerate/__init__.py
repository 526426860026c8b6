"""Lesson 03: loss curves of the loops that Accelerate runs."""
