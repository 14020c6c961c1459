"""Files: reading those of strangers, replacing whole ones, tables, named arrays, save and load."""
