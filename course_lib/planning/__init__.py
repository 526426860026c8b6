"""Planning: what a model needs, what it would cost, and how to set it up; arithmetic alone, without torch."""
