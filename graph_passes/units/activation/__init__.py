"""Activations: GELU, and the gradients of whatever is a product of functions of one tensor."""
