"""Lesson 01: the memory and time of one training step."""
