"""Where a model offers its sites, as data: a row for each family. Knows no request and no weights."""
