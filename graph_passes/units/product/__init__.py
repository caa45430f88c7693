"""What is done with the results of matrix products."""
