"""Lesson 11: runs compared, and the errors of a classifier."""
