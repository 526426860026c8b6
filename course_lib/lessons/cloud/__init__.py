"""Lesson 12: the cost of instances."""
