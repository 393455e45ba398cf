"""Batches and calls that the tests of this folder and of those below it import by their names.

Being here, this file puts the folder on the import path.
"""
