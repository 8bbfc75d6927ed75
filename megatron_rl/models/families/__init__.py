"""Families of models: the words of a description, and the table of descriptions."""
