"""What a model takes, and where it offers its sites: a row for each family. Knows no request and no weights."""
