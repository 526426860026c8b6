"""Lesson 17: the time of operators beside the limits of the machine."""
