"""What weights are: sparse dictionaries and steering vectors in one form each, whatever file they came from."""
