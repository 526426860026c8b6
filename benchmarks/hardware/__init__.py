"""The sections of ``make gpu``: what each tries on the GPUs that are there, and how their report is made."""
