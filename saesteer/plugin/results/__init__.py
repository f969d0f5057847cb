"""What comes back: counts, doses and failures, from the device to the answer of one request."""
