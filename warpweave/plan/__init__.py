"""Predict the memory and time of a training step, and find the cheapest layout: ``warpweave plan``.
Everything but the command's options needs only the standard library."""
