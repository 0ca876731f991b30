"""Parameter servers: servers hold weights and optimizer state, workers compute gradients.

The staleness of gradients is bounded. `clocks` decides which workers may continue and which
gradients are applied · `shard` is a server's part of the weights · `link` carries headers and
tensors · `server` and `worker` are the two roles · `replay` repeats a run in one process.
"""
