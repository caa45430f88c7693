"""Sums of gradients: of weights, biases and broadcast axes, and sums that nothing reads."""
