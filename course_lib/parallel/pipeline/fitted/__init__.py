"""Tables fitted to measured costs: the schedule builder, zero bubble, the search."""
