"""Batch, layer, group and root-mean-square normalization, forward and gradient."""
