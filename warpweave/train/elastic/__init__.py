"""``warpweave train --elastic``: data-parallel replicas that leave and join a run.

A *replica* holds the whole state: a data rank of ZeRO 0, or a shard group of hybrid sharding, with
its tensor, context, and pipeline ranks. A *generation* is the set of replicas that train together
until one leaves or joins (TorchElastic's rendezvous, torchft's quorum).
"""
