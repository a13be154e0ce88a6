"""Readers of the forms that datasets come in: image folders, array files, tables, lists; nothing here is a dataset."""
