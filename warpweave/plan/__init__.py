"""What a training step costs before it runs, and the layout for which it costs least: memory, time,
and ``warpweave plan``. Standard library only, but for the command's options."""
