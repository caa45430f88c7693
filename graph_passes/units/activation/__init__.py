"""GELU."""
