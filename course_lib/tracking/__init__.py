"""One interface to all trackers of runs, and reading what they kept into pandas."""
