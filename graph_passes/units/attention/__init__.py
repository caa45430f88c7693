"""Masks of attention, and the sum in the gradient of a softmax."""
