"""Where a processor keeps its state: one contract (`base`), and one file for each kind of store."""
