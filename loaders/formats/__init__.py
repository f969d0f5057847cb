"""The dictionary formats: one module each, which says where the format keeps what."""
