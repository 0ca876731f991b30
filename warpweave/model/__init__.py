"""The GPT reference model, its engine, and the plain model that proves them.

`config` the model and the parallel plan · `gpt` one pipeline stage · `engine` a training step over
the mesh · `generate` sampling with a KV cache · `plain` the same model in torch alone, on one
device, which shares no code with the rest.
"""
