"""The style of all plots, the plots that commands draw, and the kit of the diagrams."""
