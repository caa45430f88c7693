"""Measured steps of a program, and where their time goes.

In comes a program that is told by a variable to watch its own training function; out go step times,
and what TensorFlow's profiler has noted, by class of op. Nothing here knows how graphs are planned.
"""
