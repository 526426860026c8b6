"""The faults of lesson 10, their cures, and the tools that name the culprit."""
