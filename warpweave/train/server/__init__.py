"""``warpweave train --server`` and ``warpweave replay``: parameter servers, their runs again."""
