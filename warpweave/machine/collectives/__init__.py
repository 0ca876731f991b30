"""``warpweave collectives``: all-reduce algorithms, counted, priced and measured."""
