"""The GPT reference model, its engine, and the plain model that they are compared with.

`config` has the model and the parallel plan · `gpt` one rank's part of the model · `engine` a
training step over the mesh · `generate` sampling with a KV cache · `plain` the same model in torch
alone, on one device, sharing no code with the rest.
"""
