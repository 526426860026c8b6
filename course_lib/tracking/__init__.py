"""One face over the trackers of runs, and reading what they kept back into pandas."""
