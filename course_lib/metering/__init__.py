"""Meters of collectives, memory and time on each rank."""
