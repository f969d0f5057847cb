"""What is known of a dictionary's features in words: made from a text or from an export, kept in one SQLite file."""
