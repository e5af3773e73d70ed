"""Where events are sent: one contract (`base`), and one file for each kind of broker."""
