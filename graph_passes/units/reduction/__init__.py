"""Sums of gradients: of weights, biases and broadcast axes, sums that nothing reads; poolings."""
