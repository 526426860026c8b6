"""Every plot of the course, in one style."""
