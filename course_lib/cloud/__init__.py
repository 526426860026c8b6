"""Sends models to the Hugging Face Hub and jobs to the cloud, only when asked to."""
