"""Parallelisms from scratch, each over plain ``nn.Module``s and process groups, beside the engine's own."""
