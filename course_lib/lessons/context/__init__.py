"""Lesson 14: sequences that ranks share."""
