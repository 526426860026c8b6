"""The same parallelisms by torch's own engines."""
