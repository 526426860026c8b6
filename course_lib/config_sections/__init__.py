"""The sections of a run's configuration: plain fields, each with its docstring and unit.

The docstring under a field is its help on the command line, where every field is an option.
"""
