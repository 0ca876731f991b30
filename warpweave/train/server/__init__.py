"""Parameter servers (``warpweave train --server``) and the replay of their runs."""
