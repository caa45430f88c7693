"""Call trees: functions planned with their callers.

In: a graph, and a library of functions by name.
Out: the same tree with specialized bodies, and new functions for them.
May not: change a function of the library.
"""
