"""Exercises graded by behaviour: tasks, checks, the sandbox in which answers run, and reports."""
