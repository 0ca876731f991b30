"""``warpweave collectives``: count, predict, and measure all-reduce algorithms."""
