"""GELU, and softmax over several axes."""
