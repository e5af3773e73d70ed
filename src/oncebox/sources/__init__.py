"""Where a processor's events come from: one contract (`base`), and one file for each kind of source."""
