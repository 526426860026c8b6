"""Lesson 00: figures of starting ranks, and a diagram of how they meet."""
