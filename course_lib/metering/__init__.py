"""What moved, what stayed, and when: collectives, memory and time of each rank."""
