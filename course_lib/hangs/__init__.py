"""Diagnosis of hangs: the watchdog, each rank's state, and the ranks that caused a hang."""
