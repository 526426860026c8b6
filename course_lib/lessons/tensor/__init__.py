"""Lesson 08: split layers, and grids of ranks."""
