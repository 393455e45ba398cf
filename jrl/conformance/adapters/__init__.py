"""Functions of other libraries under the names and conventions of the cases.

A module has `functions`: quantity, label and function of each. A function raises `NotExpressed` for
what its library cannot do.
"""
