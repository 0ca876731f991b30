"""The calls of other libraries, answered by the kernels of this one: a user changes one import.

`flash_attn` the functions of flash-attention 2 · `liger` the modules of Liger-Kernel. Both take the
arguments of their namesakes, in their order and with their meaning. What the kernels cannot do is
an error that names the argument; what is only a hint about speed there is taken and said so.
"""
