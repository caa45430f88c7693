"""Updates of variables by optimizers: one op for what an optimizer writes in a dozen."""
