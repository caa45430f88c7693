"""Two models on the same inputs: how far their outputs are apart, how fast and how large they are.

In: models on disk, and samples from a file, a Python function or a random generator.
Out: figures for each output, and whether they are within a tolerance.
May not: change a model, or compare what was not fed alike.
"""
