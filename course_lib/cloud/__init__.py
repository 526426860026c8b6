"""What leaves the machine, and only when it was asked to: the Hub, and jobs in the cloud."""
