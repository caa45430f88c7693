"""Reading a graph.

In: a GraphDef or FunctionDef, and the static shapes that are known of it.
Out: `GraphView`: nodes, ports, (node, type attribute) vertices, edges, as arrays; and copies.
May not: decide anything, or change the caller's proto.
"""
