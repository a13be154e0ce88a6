"""Readers for the file formats of datasets: image folders, array files, tables and lists."""
