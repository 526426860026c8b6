"""What the notebooks share and measure: one module for each lesson's experiments."""
