"""The project of lesson 13: its decisions, its rehearsal on this machine, its rubric."""
