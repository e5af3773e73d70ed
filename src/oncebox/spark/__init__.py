"""Thin hosts of the engines on Spark: the only room that knows it."""
