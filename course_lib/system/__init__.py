"""Surroundings of a run: the machine and its abilities, access to the Hub, the random streams."""
