"""Everything that a run writes, reads back and goes on from."""
