"""Lesson 02: gradients averaged by ranks, one by one and in buckets."""
