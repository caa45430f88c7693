"""Losses that cheaper ops compute."""
