"""The formats of dictionaries, a module for each, which says where the format keeps what."""
