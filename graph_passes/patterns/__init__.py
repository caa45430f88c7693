"""Subgraphs that are treated as units."""
