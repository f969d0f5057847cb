"""Sparse dictionaries and steering vectors, each in one form whatever file they came from; knows no file format."""
