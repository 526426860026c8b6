"""Starts ranks on this machine, watches over them, and brings back what they return and print."""
