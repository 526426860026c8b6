"""Lesson 04: metrics that do not depend on the number of ranks."""
