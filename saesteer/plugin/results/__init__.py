"""Counts, doses and failures on their way from the device to the answer of a request; this room knows no HTTP."""
