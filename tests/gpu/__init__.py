"""Tests of what runs on GPUs, on the simulated device of tests/gpu_sim."""
