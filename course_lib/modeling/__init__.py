"""Models and tokenizers by Hub name, local folder or preset, ready for a task."""
