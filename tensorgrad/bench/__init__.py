"""Benchmarks as courses and papers have them, each a sweep that keeps every finished row.

`tensorgrad bench NAME` runs one and writes a table as CSV and Markdown, and pictures. sweep.py is
what they share. Guide: docs/guides/benchmarks.md.
"""
