"""The machine and its ranks: launching, seeding, and what the hardware can do."""
