"""Parameter servers: weights and optimizer on servers, gradients from workers, staleness bounded.

`clocks` decides who may go on and which gradients are applied · `shard` is a server's part of the
weights · `link` carries headers and tensors · `server` and `worker` are the two roles · `replay`
repeats a run in one process.
"""
