"""Where a run finds itself: the machine and what it can do, whether the Hub answers, the random streams."""
