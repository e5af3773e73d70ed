"""The stores: every line of SQL lives here and only here."""
