"""Losses, by the ops that they consist of."""
